"""The promises of shared/broker/base.py, held by every broker."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pika
import pytest

from shared.broker import MemoryBroker, MemoryHub
from shared.broker.base import MAX_BODY_BYTES, Broker, Delivery, Outgoing
from shared.broker.rabbitmq import RabbitmqBroker
from shared.errors import BrokerUnavailable, ConfigError, PublishRefused, Unroutable
from shared.topology import QueueSpec, QueueType

WAIT_S = 10.0  # for what must come
SHORT_S = 0.1  # for what must not


class World:
    """Brokers that share queues, and names that no other test uses."""

    def __init__(self, make: Callable[[], Broker]) -> None:
        self._make = make
        self._brokers: list[Broker] = []
        self.names: list[str] = []

    def broker(self) -> Broker:
        broker = self._make()
        self._brokers.append(broker)
        return broker

    def name(self) -> str:
        self.names.append(f"cellpipe.test.{uuid.uuid4().hex}")
        return self.names[-1]

    def close(self) -> None:
        for broker in self._brokers:
            broker.close()


@pytest.fixture(
    params=[
        "memory",
        pytest.param("rabbitmq", marks=pytest.mark.servers),
        pytest.param("rabbitmq in the taker", marks=pytest.mark.servers),
    ],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param == "memory":
        hub = MemoryHub()
        world = World(lambda: MemoryBroker(hub))
        yield world
        world.close()
        return
    url = request.getfixturevalue("amqp_url")
    runs_in_taker = request.param == "rabbitmq in the taker"
    world = World(lambda: RabbitmqBroker.connect(url, runs_in_taker=runs_in_taker))
    yield world
    world.close()
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        channel = connection.channel()
        for name in world.names:
            channel.queue_delete(name)


@pytest.fixture
def broker(world: World) -> Broker:
    return world.broker()


@pytest.fixture
def queue(world: World, broker: Broker) -> str:
    """A declared queue."""
    name = world.name()
    broker.declare([QueueSpec(name)])
    return name


def send(broker: Broker, queue: str, *bodies: bytes) -> None:
    broker.publish([Outgoing(queue, body) for body in bodies]).wait(WAIT_S)


def take(broker: Broker) -> Delivery:
    delivery = broker.take(WAIT_S)
    assert delivery is not None, "nothing was delivered"
    return delivery


def test_acks_settle_those_deliveries_and_no_others(
    world: World, broker: Broker, queue: str
) -> None:
    bodies = [bytes([number]) for number in range(1, 8)]
    send(broker, queue, *bodies)
    first = world.broker()
    first.consume(queue, prefetch=10)
    taken = [take(first) for _ in bodies]

    for number in (2, 1, 3, 6):
        first.ack(taken[number - 1])
    first.reject(taken[4 - 1], requeue=False)
    first.close()

    broker.consume(queue, prefetch=10)
    left = [take(broker) for _ in range(2)]
    assert sorted(delivery.body for delivery in left) == [b"\x05", b"\x07"]
    assert broker.take(SHORT_S) is None


def test_a_message_arrives_with_its_properties(broker: Broker, queue: str) -> None:
    broker.consume(queue, prefetch=4)
    body = bytes(range(256)) * 16

    broker.publish(
        [Outgoing(queue, body, True, "application/json", correlation_id="c-1", reply_to="answers")]
    ).wait(WAIT_S)

    delivery = take(broker)
    assert (delivery.queue, delivery.body, delivery.redelivered) == (queue, body, False)
    assert delivery.content_type == "application/json"
    assert (delivery.correlation_id, delivery.reply_to) == ("c-1", "answers")


@pytest.mark.parametrize("num_bytes", [0, 1, 131_064, 131_065, 1 << 20, MAX_BODY_BYTES])
def test_bodies_of_every_size_arrive_whole(broker: Broker, queue: str, num_bytes: int) -> None:
    body = (b"0123456789abcdef" * (num_bytes // 16 + 1))[:num_bytes]
    broker.consume(queue, prefetch=1)

    send(broker, queue, body)

    assert take(broker).body == body


class Late:
    """A body that is made when somebody asks."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __bytes__(self) -> bytes:
        return self._body

    def may_be_over(self, max_bytes: int) -> bool:
        return len(self._body) > max_bytes


def test_a_body_that_is_made_late_arrives_as_its_bytes(
    world: World, broker: Broker, queue: str
) -> None:
    heir = world.broker()
    broker.consume(queue, prefetch=1)

    broker.publish([Outgoing(queue, Late(b"late"))]).wait(WAIT_S)
    first = take(broker)
    broker.cancel(queue)
    heir.consume(queue, prefetch=1)
    broker.reject(first, requeue=True)
    again = take(heir)

    assert (first.body, again.body, again.redelivered) == (b"late", b"late", True)
    with pytest.raises(ValueError, match=queue):
        broker.publish([Outgoing(queue, Late(bytes(MAX_BODY_BYTES + 1)))])


def test_a_body_over_the_limit_is_refused_before_it_is_sent(broker: Broker, queue: str) -> None:
    with pytest.raises(ValueError, match=queue):
        broker.publish([Outgoing(queue, bytes(MAX_BODY_BYTES + 1))])

    assert broker.depth(queue) == 0


def test_messages_arrive_in_the_order_of_their_publish(broker: Broker, queue: str) -> None:
    bodies = [str(n).encode() for n in range(50)]
    broker.consume(queue, prefetch=100)

    send(broker, queue, *bodies[:20])
    for body in bodies[20:]:
        send(broker, queue, body)

    assert [take(broker).body for _ in bodies] == bodies


def test_a_missing_queue_is_unroutable_and_the_rest_is_sent(
    world: World, broker: Broker, queue: str
) -> None:
    missing = world.name()

    confirm = broker.publish([Outgoing(missing, b"lost"), Outgoing(queue, b"kept")])

    with pytest.raises(Unroutable, match=missing):
        confirm.wait(WAIT_S)
    broker.consume(queue, prefetch=1)
    assert take(broker).body == b"kept"


def test_a_full_queue_refuses_until_it_is_drained(world: World, broker: Broker) -> None:
    queue = world.name()
    broker.declare([QueueSpec(queue, QueueType.QUORUM, max_length=2)])
    send(broker, queue, b"1")
    send(broker, queue, b"2")

    refusals = []
    for _ in range(8):  # a quorum queue may take a few more before it notices
        try:
            send(broker, queue, b"over")
        except PublishRefused as error:
            refusals.append(str(error))

    assert refusals
    assert queue in refusals[0]
    broker.consume(queue, prefetch=20)
    broker.ack(take(broker))
    while (delivery := broker.take(SHORT_S)) is not None:
        broker.ack(delivery)
    send(broker, queue, b"fits again")
    assert take(broker).body == b"fits again"


def test_a_queue_is_full_of_bytes_as_well(world: World, broker: Broker) -> None:
    queue = world.name()
    broker.declare([QueueSpec(queue, QueueType.QUORUM, max_length=1_000, max_bytes=1 << 20)])
    body = bytes(1 << 18)
    refusals = 0

    for _ in range(24):
        try:
            send(broker, queue, body)
        except PublishRefused:
            refusals += 1

    assert refusals > 8  # a quorum queue may take a few more before it notices
    assert 4 <= (broker.depth(queue) or 0) == 24 - refusals


def test_an_empty_publish_is_confirmed_at_once(broker: Broker) -> None:
    broker.publish([]).wait(0.0)


def test_take_returns_none_when_nothing_comes(broker: Broker, queue: str) -> None:
    broker.consume(queue, prefetch=1)

    assert broker.take(SHORT_S) is None


def test_what_a_closed_broker_held_is_delivered_again(
    world: World, broker: Broker, queue: str
) -> None:
    leaver = world.broker()
    leaver.consume(queue, prefetch=2)
    send(broker, queue, b"taken", b"not taken", b"not delivered")
    take(leaver)

    leaver.close()

    broker.consume(queue, prefetch=3)
    again = [take(broker) for _ in range(3)]
    assert [d.body for d in again] == [b"taken", b"not taken", b"not delivered"]
    assert [d.redelivered for d in again] == [True, True, False]


def test_what_was_acked_is_gone(world: World, broker: Broker, queue: str) -> None:
    leaver = world.broker()
    leaver.consume(queue, prefetch=1)
    send(broker, queue, b"done")
    leaver.ack(take(leaver))

    leaver.close()

    broker.consume(queue, prefetch=1)
    assert broker.take(SHORT_S) is None
    assert broker.depth(queue) == 0


def test_requeued_deliveries_come_again(broker: Broker, queue: str) -> None:
    broker.consume(queue, prefetch=1)
    send(broker, queue, b"again")

    broker.reject(take(broker), requeue=True)

    again = take(broker)
    assert (again.body, again.redelivered) == (b"again", True)


def test_rejected_deliveries_move_to_the_dead_letter_queue(world: World, broker: Broker) -> None:
    queue, dead = world.name(), world.name()
    broker.declare([QueueSpec(dead), QueueSpec(queue, dead_letter_queue=dead)])
    broker.consume(queue, prefetch=1)
    broker.publish([Outgoing(queue, b"poison", correlation_id="c-9")]).wait(WAIT_S)

    broker.reject(take(broker), requeue=False)

    broker.consume(dead, prefetch=1)
    buried = take(broker)
    assert (buried.queue, buried.body, buried.correlation_id) == (dead, b"poison", "c-9")


def test_a_delivery_limit_ends_endless_redelivery(world: World, broker: Broker) -> None:
    queue, dead = world.name(), world.name()
    limited = QueueSpec(queue, QueueType.QUORUM, dead_letter_queue=dead, delivery_limit=2)
    broker.declare([QueueSpec(dead), limited])
    broker.consume(queue, prefetch=1)
    broker.consume(dead, prefetch=1)
    send(broker, queue, b"again and again")

    seen = []
    while not seen or seen[-1] != dead:
        delivery = take(broker)
        seen.append(delivery.queue)
        broker.reject(delivery, requeue=True)
        assert len(seen) < 10

    assert seen == [queue, queue, queue, dead]


def test_prefetch_bounds_what_is_unsettled(broker: Broker, queue: str) -> None:
    broker.consume(queue, prefetch=2)
    send(broker, queue, b"1", b"2", b"3")
    first, second = take(broker), take(broker)
    assert broker.take(SHORT_S) is None

    broker.ack(first)

    third = take(broker)
    assert [d.body for d in (first, second, third)] == [b"1", b"2", b"3"]


def test_prefetch_is_per_queue(world: World, broker: Broker, queue: str) -> None:
    other = world.name()
    broker.declare([QueueSpec(other)])
    broker.consume(queue, prefetch=1)
    broker.consume(other, prefetch=1)

    send(broker, queue, b"1", b"2")
    send(broker, other, b"3", b"4")

    assert {take(broker).body, take(broker).body} == {b"1", b"3"}
    assert broker.take(SHORT_S) is None


def test_settling_twice_harms_nothing(broker: Broker, queue: str) -> None:
    broker.consume(queue, prefetch=1)
    send(broker, queue, b"1")
    first = take(broker)
    broker.ack(first)

    broker.ack(first)
    broker.reject(first, requeue=True)

    send(broker, queue, b"2")
    second = take(broker)
    assert (second.body, second.redelivered) == (b"2", False)
    assert broker.connected()


def test_a_late_ack_does_not_settle_the_redelivery(
    world: World, broker: Broker, queue: str
) -> None:
    broker.consume(queue, prefetch=1)
    send(broker, queue, b"held")
    first = take(broker)
    broker.reject(first, requeue=True)
    take(broker)

    broker.ack(first)

    broker.close()
    heir = world.broker()
    heir.consume(queue, prefetch=1)
    assert take(heir).body == b"held"


def test_settling_after_close_is_silent(world: World, broker: Broker, queue: str) -> None:
    leaver = world.broker()
    leaver.consume(queue, prefetch=1)
    send(broker, queue, b"held")
    delivery = take(leaver)
    leaver.close()

    leaver.ack(delivery)
    leaver.reject(delivery, requeue=False)

    broker.consume(queue, prefetch=1)
    assert take(broker).redelivered


def test_cancel_gives_back_what_was_not_taken(world: World, broker: Broker, queue: str) -> None:
    leaver = world.broker()
    leaver.consume(queue, prefetch=3)
    send(broker, queue, b"1", b"2", b"3")
    first = take(leaver)

    leaver.cancel(queue)

    assert leaver.take(SHORT_S) is None
    broker.consume(queue, prefetch=3)
    assert [take(broker).body, take(broker).body] == [b"2", b"3"]
    leaver.ack(first)  # what was taken before is still ours to settle
    leaver.close()
    assert broker.take(SHORT_S) is None


def test_a_cancelled_queue_can_be_consumed_again(broker: Broker, queue: str) -> None:
    broker.consume(queue, prefetch=1)
    send(broker, queue, b"1", b"2")
    first = take(broker)
    broker.cancel(queue)

    broker.consume(queue, prefetch=1)
    broker.ack(first)

    second = take(broker)
    assert second.body == b"2"
    broker.ack(second)


def test_two_brokers_share_the_work_of_a_queue(world: World, broker: Broker, queue: str) -> None:
    other = world.broker()
    for each in (broker, other):
        each.consume(queue, prefetch=1)

    send(broker, queue, b"1", b"2")

    assert {take(broker).body, take(other).body} == {b"1", b"2"}


def test_declaring_again_is_harmless(broker: Broker, queue: str) -> None:
    send(broker, queue, b"kept")

    broker.declare([QueueSpec(queue)])

    assert broker.depth(queue) == 1


def test_other_arguments_for_an_existing_queue_are_refused(broker: Broker, queue: str) -> None:
    with pytest.raises(ConfigError, match=queue):
        broker.declare([QueueSpec(queue, max_length=5)])

    send(broker, queue, b"the broker still works")
    assert broker.depth(queue) == 1


def test_a_queue_that_does_not_exist_cannot_be_consumed(
    world: World, broker: Broker, queue: str
) -> None:
    missing = world.name()

    with pytest.raises(ConfigError, match=missing):
        broker.consume(missing, prefetch=1)

    broker.consume(queue, prefetch=1)
    send(broker, queue, b"others are consumed all the same")
    assert take(broker)


def test_a_queue_is_consumed_once(broker: Broker, queue: str) -> None:
    broker.consume(queue, prefetch=1)

    with pytest.raises(ConfigError, match=queue):
        broker.consume(queue, prefetch=1)


def test_depth_counts_what_is_ready(world: World, broker: Broker, queue: str) -> None:
    assert broker.depth(world.name()) is None
    assert broker.depth(queue) == 0

    send(broker, queue, b"1", b"2")

    assert broker.depth(queue) == 2


def test_four_threads_may_publish_at_once(broker: Broker, queue: str) -> None:
    def publish(thread: int) -> None:
        for n in range(25):
            send(broker, queue, f"{thread}-{n}".encode())

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(4)]
    broker.consume(queue, prefetch=100)

    for thread in threads:
        thread.start()

    bodies = [take(broker).body.decode() for _ in range(100)]
    for thread in threads:
        thread.join(WAIT_S)
    for thread in range(4):  # each thread's own order is kept
        own = [body for body in bodies if body.startswith(f"{thread}-")]
        assert own == [f"{thread}-{n}" for n in range(25)]


def test_close_wakes_a_waiting_take(world: World, queue: str) -> None:
    waiter = world.broker()
    waiter.consume(queue, prefetch=1)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            waiter.take(WAIT_S)
        except BrokerUnavailable as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()

    waiter.close()

    thread.join(WAIT_S / 2)
    assert len(raised) == 1
    assert not waiter.connected()


def test_a_closed_broker_sends_nothing(world: World, broker: Broker, queue: str) -> None:
    closed = world.broker()
    closed.close()

    confirm = closed.publish([Outgoing(queue, b"late")])

    with pytest.raises(BrokerUnavailable):
        confirm.wait(WAIT_S)
    with pytest.raises(BrokerUnavailable):
        closed.declare([QueueSpec(queue)])
    assert broker.depth(queue) == 0
    closed.close()


@pytest.mark.parametrize("queue_type", QueueType)
def test_what_waits_too_long_is_handed_over_to_another_queue(
    world: World, broker: Broker, queue_type: QueueType
) -> None:
    shared, inbox = world.name(), world.name()
    limited = QueueSpec(inbox, queue_type, dead_letter_queue=shared, message_ttl_ms=150)
    broker.declare([QueueSpec(shared, queue_type), limited])
    broker.consume(shared, prefetch=1)
    broker.publish([Outgoing(inbox, b"late", headers=(("why", "test"),))]).wait(WAIT_S)

    delivery = take(broker)

    assert (delivery.queue, delivery.body, delivery.redelivered) == (shared, b"late", False)
    assert (delivery.handed_over_from, delivery.headers) == (inbox, (("why", "test"),))
    assert broker.depth(inbox) == 0


@pytest.mark.parametrize("queue_type", QueueType)
def test_what_is_delivered_in_time_is_not_handed_over(
    world: World, broker: Broker, queue_type: QueueType
) -> None:
    shared, inbox = world.name(), world.name()
    limited = QueueSpec(inbox, queue_type, dead_letter_queue=shared, message_ttl_ms=100)
    broker.declare([QueueSpec(shared, queue_type), limited])
    broker.consume(shared, prefetch=1)
    broker.consume(inbox, prefetch=1)

    send(broker, inbox, b"held")
    held = take(broker)

    assert (held.queue, held.handed_over_from) == (inbox, "")
    assert broker.take(3 * SHORT_S) is None


@pytest.mark.parametrize("queue_type", QueueType)
def test_what_a_dead_consumer_held_past_the_limit_is_handed_over(
    world: World, broker: Broker, queue_type: QueueType
) -> None:
    shared, inbox = world.name(), world.name()
    limited = QueueSpec(inbox, queue_type, dead_letter_queue=shared, message_ttl_ms=100)
    broker.declare([QueueSpec(shared, queue_type), limited])
    broker.consume(shared, prefetch=2)
    victim = world.broker()
    victim.consume(inbox, prefetch=1)
    send(broker, inbox, b"held", b"waiting")
    take(victim)
    assert take(broker).body == b"waiting"  # beyond the victim's prefetch

    victim.close()

    assert take(broker).body == b"held"


@pytest.mark.parametrize("queue_type", QueueType)
def test_an_unused_queue_expires_and_a_used_one_stays(
    world: World, broker: Broker, queue_type: QueueType
) -> None:
    used, unused = world.name(), world.name()
    broker.declare([QueueSpec(name, queue_type, expires_ms=200) for name in (used, unused)])
    broker.consume(used, prefetch=1)

    deadline_s = time.monotonic() + WAIT_S
    while broker.depth(unused) is not None and time.monotonic() < deadline_s:
        broker.take(2 * 0.2)  # a look at its depth may count as use

    assert broker.depth(unused) is None
    assert broker.depth(used) == 0


def test_a_message_goes_to_another_queue_when_its_own_is_missing(
    world: World, broker: Broker, queue: str
) -> None:
    missing, other = world.name(), world.name()
    broker.declare([QueueSpec(other)])
    broker.consume(other, prefetch=4)
    broker.consume(queue, prefetch=4)

    broker.publish(
        [
            Outgoing(missing, b"1", instead=other, headers=(("n", "1"),)),
            Outgoing(queue, b"2", instead=other),
        ]
    ).wait(WAIT_S)

    arrived = {(d.queue, d.body, d.headers) for d in (take(broker), take(broker))}
    assert arrived == {(other, b"1", (("n", "1"),)), (queue, b"2", ())}


def test_when_both_queues_are_missing_the_message_is_unroutable(
    world: World, broker: Broker
) -> None:
    first, second = world.name(), world.name()

    with pytest.raises(Unroutable, match=second):
        broker.publish([Outgoing(first, b"lost", instead=second)]).wait(WAIT_S)
