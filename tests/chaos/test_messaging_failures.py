"""What other systems' users reported of their brokers, as tests for ours.

Each name is a report: see `docs/failure-model.md`. Here is the client side of RabbitMQ; processes
are in `test_process_failures.py`, Redis in `test_store_failures.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pika.channel
import pytest

from shared.broker.base import Outgoing
from shared.broker.rabbitmq import RabbitmqBroker
from shared.errors import BrokerUnavailable
from shared.topology import QueueSpec, control_queues
from tests.conftest import proxied_url
from tests.servers import PrivateServers
from tests.tcp_proxy import TcpProxy
from tests.waiting import WAIT_S, delete_queue, take, wait_until

pytestmark = pytest.mark.servers

CHANNEL_CALLS = ("basic_publish", "basic_ack", "basic_reject", "basic_consume", "queue_declare")


def test_every_pika_call_is_on_the_io_thread(
    amqp_url: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callers: set[int] = set()
    for name in CHANNEL_CALLS:
        monkeypatch.setattr(
            pika.channel.Channel, name, _noting(getattr(pika.channel.Channel, name), callers)
        )
    with closing(RabbitmqBroker.connect(amqp_url)) as broker:
        broker.declare([QueueSpec(queue)])
        broker.consume(queue, prefetch=200)

        def work(number: int) -> None:
            for _ in range(25):
                broker.publish([Outgoing(queue, bytes([number]))]).wait(WAIT_S)
                broker.depth(queue)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for number in range(100):
            delivery = take(broker)
            if number % 10 == 5 and not delivery.redelivered:
                broker.reject(delivery, requeue=True)
                broker.ack(take(broker))
            else:
                broker.ack(delivery)
        for thread in threads:
            thread.join(WAIT_S)

        assert broker.connected()
        assert broker.depth(queue) == 0
    assert len(callers) == 1
    assert threading.get_ident() not in callers


def _noting(method: Callable[..., Any], callers: set[int]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        callers.add(threading.get_ident())
        return method(*args, **kwargs)

    return call


def test_compute_longer_than_four_heartbeats_keeps_the_connection(
    amqp_url: str, queue: str
) -> None:
    with closing(RabbitmqBroker.connect(amqp_url, heartbeat_s=1)) as broker:
        broker.declare([QueueSpec(queue)])
        broker.consume(queue, prefetch=1)
        broker.publish([Outgoing(queue, b"long")]).wait(WAIT_S)
        delivery = take(broker)

        time.sleep(4.5)  # the "computation": a broker drops a peer silent for two heartbeats

        broker.ack(delivery)
        assert broker.take(0.1) is None  # a lost connection would deliver it again
        assert broker.connected()


def test_paused_broker_at_start_backs_off_and_recovers(own_servers: PrivateServers) -> None:
    url = own_servers.url("rabbitmq")
    own_servers.freeze("rabbitmq")
    try:
        began = time.monotonic()
        with pytest.raises(BrokerUnavailable, match="within 1 s"):
            RabbitmqBroker.connect(url, connect_timeout_s=1.0)
        gave_up_after_s = time.monotonic() - began
        threading.Timer(1.0, own_servers.thaw, ("rabbitmq",)).start()

        patient = RabbitmqBroker.connect(url, connect_timeout_s=WAIT_S)
    finally:
        own_servers.thaw("rabbitmq")

    with closing(patient):
        assert gave_up_after_s < 3.0
        patient.declare([QueueSpec("cellpipe.test.paused")])
        patient.publish([Outgoing("cellpipe.test.paused", b"after")]).wait(WAIT_S)


@pytest.mark.parametrize(
    "num_messages",
    [50_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
def test_a_million_confirms_leave_rss_flat(
    broker: RabbitmqBroker, queue: str, num_messages: int
) -> None:
    broker.declare([QueueSpec(queue)])
    broker.consume(queue, prefetch=200)

    def publish(num_batches: int) -> None:
        for _ in range(num_batches):
            confirm = broker.publish([Outgoing(queue, bytes(2048))] * 100)
            for _ in range(100):
                broker.ack(take(broker))
            confirm.wait(WAIT_S)

    publish(50)
    before = _resident_bytes()

    publish(num_messages // 100)

    assert _resident_bytes() - before < 2 << 20  # 100 MB of bodies went through


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


# pika looks each heartbeat + 5 s and needs two looks: three heartbeats from 10 s on, our default.
@pytest.mark.parametrize(
    ("heartbeat_s", "bound_s"), [(2, 15.0), pytest.param(10, 31.0, marks=pytest.mark.slow)]
)
def test_idle_then_dropped_path_is_noticed_within_three_heartbeats(
    proxy: TcpProxy, queue: str, heartbeat_s: int, bound_s: float
) -> None:
    with closing(RabbitmqBroker.connect(proxied_url(proxy), heartbeat_s=heartbeat_s)) as broker:
        broker.declare([QueueSpec(queue)])
        broker.consume(queue, prefetch=1)

        proxy.stall()

        wait_until(lambda: not broker.connected(), "it notices", timeout_s=bound_s)
        proxy.heal()
        wait_until(broker.connected, "it is connected again")
        broker.publish([Outgoing(queue, b"after")]).wait(WAIT_S)
        assert take(broker).body == b"after"


def test_consumer_cancelled_by_broker_resubscribes(
    broker: RabbitmqBroker, amqp_url: str, queue: str
) -> None:
    broker.declare([QueueSpec(queue)])
    broker.consume(queue, prefetch=1)
    broker.publish([Outgoing(queue, b"lost with its queue")]).wait(WAIT_S)
    lost = take(broker)

    delete_queue(amqp_url, queue)  # the broker cancels the queue's consumers
    wait_until(lambda: broker.depth(queue) is not None, "it is declared again")
    broker.ack(lost)

    broker.publish([Outgoing(queue, b"after")]).wait(WAIT_S)
    assert take(broker).body == b"after"


def test_no_stale_ack_after_reconnect(proxied: RabbitmqBroker, proxy: TcpProxy, queue: str) -> None:
    proxied.declare([QueueSpec(queue)])
    proxied.consume(queue, prefetch=2)
    proxied.publish([Outgoing(queue, b"1"), Outgoing(queue, b"2")]).wait(WAIT_S)
    stale = take(proxied)  # the second one waits in the inbox, stale as well
    proxy.cut()
    proxy.heal()
    again = {d.body: d for d in (take(proxied), take(proxied))}

    proxied.ack(stale)

    assert set(again) == {b"1", b"2"}
    assert again[b"1"].redelivered
    for delivery in again.values():
        proxied.ack(delivery)
    assert proxied.take(0.2) is None
    assert proxied.connected()


# A link that flaps backs off up to 5 s: twenty losses take a minute.
@pytest.mark.parametrize("num_losses", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_connection_losses_restore_every_consumer(
    proxied: RabbitmqBroker, proxy: TcpProxy, amqp_url: str, queue: str, num_losses: int
) -> None:
    queues = [queue, *(f"{queue}.{number}" for number in range(4))]
    proxied.declare([QueueSpec(name) for name in queues])
    for name in queues:
        proxied.consume(name, prefetch=2)
    try:
        for _ in range(num_losses):
            proxy.cut()
            proxy.heal()
            wait_until(proxied.connected, "it is connected again")

            proxied.publish([Outgoing(name, name.encode()) for name in queues]).wait(WAIT_S)
            came = {}
            while len(came) < len(queues):  # one that was not acked in time comes twice
                delivery = take(proxied)
                came[delivery.queue] = delivery.body
                proxied.ack(delivery)
            assert came == {name: name.encode() for name in queues}
    finally:
        for name in queues[1:]:
            delete_queue(amqp_url, name)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_broker_restarts_restore_every_consumer(own_servers: PrivateServers) -> None:
    queues = [f"cellpipe.test.restarts.{number}" for number in range(4)]
    with closing(RabbitmqBroker.connect(own_servers.url("rabbitmq"))) as broker:
        broker.declare([QueueSpec(name) for name in queues])
        for name in queues:
            broker.consume(name, prefetch=2)
        for _ in range(20):
            own_servers.kill("rabbitmq")
            own_servers.url("rabbitmq")
            wait_until(broker.connected, "it is connected again", timeout_s=60)

            broker.publish([Outgoing(name, b"x", persistent=True) for name in queues]).wait(WAIT_S)
            came = set()
            while came != set(queues):
                delivery = take(broker)
                came.add(delivery.queue)
                broker.ack(delivery)


def test_old_and_new_topology_versions_side_by_side(broker: RabbitmqBroker, amqp_url: str) -> None:
    ours = control_queues()
    # Another schema's queues: other arguments under other names.
    theirs = [QueueSpec(spec.name.replace(".v2.", ".v1."), max_length=7) for spec in ours]
    broker.declare(ours)
    with closing(RabbitmqBroker.connect(amqp_url)) as old:
        try:
            old.declare(theirs)
            old.publish([Outgoing(theirs[1].name, b"old")]).wait(WAIT_S)

            broker.declare(ours)

            assert broker.depth(theirs[1].name) == 1
            assert {s.name for s in ours}.isdisjoint(s.name for s in theirs)
            assert old.connected()
            assert broker.connected()
        finally:
            for spec in theirs:
                delete_queue(amqp_url, spec.name)


def test_producer_errors_by_deadline_and_nothing_expired_is_sent(
    proxied: RabbitmqBroker, proxy: TcpProxy, queue: str
) -> None:
    proxied.declare([QueueSpec(queue)])
    proxy.cut()
    hasty = proxied.publish([Outgoing(queue, b"given up by its waiter")])
    forgotten = proxied.publish([Outgoing(queue, b"given up by the deadline")])

    with pytest.raises(BrokerUnavailable, match="not sent"):
        hasty.wait(0.01)
    with pytest.raises(BrokerUnavailable, match="not sent"):
        forgotten.wait(WAIT_S)

    proxy.heal()
    wait_until(proxied.connected, "it is connected again")
    proxied.publish([Outgoing(queue, b"in time")]).wait(WAIT_S)
    assert proxied.depth(queue) == 1
