"""What only a broker behind a network can get wrong: lost connections, silence, restarts."""

from __future__ import annotations

import struct
import time
from concurrent.futures import Future
from contextlib import closing, suppress
from urllib.parse import urlsplit

import pika
import pytest

from shared.broker.base import Outgoing
from shared.broker.rabbitmq import RabbitmqBroker
from shared.errors import BrokerUnavailable, ConfigError, ConfirmTimeout
from shared.topology import QueueSpec
from tests.servers import PrivateServers
from tests.tcp_proxy import TcpProxy
from tests.waiting import WAIT_S, delete_queue, take, wait_until

pytestmark = pytest.mark.servers


def test_a_lost_connection_restores_queues_and_consumers(
    proxied: RabbitmqBroker, proxy: TcpProxy, amqp_url: str, queue: str
) -> None:
    proxied.declare([QueueSpec(queue)])
    proxied.consume(queue, prefetch=1)
    proxy.cut()
    delete_queue(amqp_url, queue)

    proxy.heal()

    wait_until(proxied.connected, "it is connected again")
    proxied.publish([Outgoing(queue, b"after")]).wait(WAIT_S)
    assert take(proxied).body == b"after"


@pytest.mark.parametrize("link", ["_publish_link", "_consume_link"])
def test_calls_in_the_moment_in_which_a_connection_closes_do_no_harm(
    broker: RabbitmqBroker, queue: str, amqp_url: str, link: str
) -> None:
    others = [f"{queue}.{n}" for n in range(3)]
    broker.declare([QueueSpec(name) for name in (queue, *others)])
    for name in (queue, *others[:2]):
        broker.consume(name, prefetch=1)
    broker.publish([Outgoing(others[0], b"held")]).wait(WAIT_S)
    held = take(broker)
    io, connection = broker._io, getattr(broker, link)._connection
    # All of this runs in one turn of the IO thread, so the connection is still closing.
    io.post(connection.close)
    publish = broker.publish([Outgoing(queue, b"meanwhile")])
    answers = [Future[None]() for _ in range(3)]
    io.post(lambda: broker._redeclare(queue, lambda: None))
    io.post(lambda: broker._subscriptions.cancel(others[0], answers[0]))
    io.post(lambda: broker._subscriptions.cancel(others[1], answers[1]))
    io.post(lambda: broker._subscriptions.consume(others[2], 1, answers[2]))
    broker.ack(held)

    for answer in answers:
        answer.result(WAIT_S)
    with suppress(
        BrokerUnavailable, ConfirmTimeout
    ):  # its fate was open when the connection closed
        publish.wait(WAIT_S)
    wait_until(broker.connected, "it is connected again")
    for name in (queue, others[2]):
        broker.publish([Outgoing(name, b"after")]).wait(WAIT_S)
    received = {
        (d.queue, d.body) for d in iter(lambda: broker.take(1.0), None) if d.queue != others[0]
    }
    assert received >= {(others[2], b"after")}
    assert {name for name, _ in received} == {queue, others[2]}
    for name in others:
        delete_queue(amqp_url, name)


def test_a_publish_without_connection_leaves_once_it_is_back(
    proxied: RabbitmqBroker, proxy: TcpProxy, queue: str
) -> None:
    proxied.declare([QueueSpec(queue)])
    proxy.cut()

    confirm = proxied.publish([Outgoing(queue, b"patient")])
    proxy.heal()

    confirm.wait(WAIT_S)
    assert proxied.depth(queue) == 1


def test_a_delivery_tells_when_it_was_handed_over_and_when_it_came(
    proxied: RabbitmqBroker, queue: str
) -> None:
    proxied.declare([QueueSpec(queue)])
    began_us = time.time_ns() // 1000

    proxied.publish([Outgoing(queue, b"1")]).wait(WAIT_S)
    proxied.consume(queue, prefetch=1)
    delivery = take(proxied)

    ended_us = time.time_ns() // 1000
    assert began_us <= delivery.sent_unix_us < delivery.arrived_unix_us <= ended_us


def test_what_waits_for_a_connection_is_bounded(
    proxied: RabbitmqBroker, proxy: TcpProxy, queue: str
) -> None:
    proxy.cut()
    body = bytes(8 << 20)

    confirms = [proxied.publish([Outgoing(queue, body)]) for _ in range(9)]

    with pytest.raises(BrokerUnavailable, match="wait for one already"):
        confirms[8].wait(WAIT_S)


def test_a_killed_server_comes_back_with_all_it_confirmed(
    own_servers: PrivateServers, runs_in_taker: bool
) -> None:
    queue = "cellpipe.test.restart"
    with closing(
        RabbitmqBroker.connect(own_servers.url("rabbitmq"), runs_in_taker=runs_in_taker)
    ) as broker:
        # On Mnesia the last declaration may be taken back by a kill just after it: the record that
        # commits it reaches the disk with the next one, or a moment later.
        broker.declare([QueueSpec(queue), QueueSpec("cellpipe.test.declared-later")])
        broker.consume(queue, prefetch=1)
        broker.publish([Outgoing(queue, b"1", persistent=True)]).wait(WAIT_S)
        broker.publish([Outgoing(queue, b"2", persistent=True)]).wait(WAIT_S)
        stale = take(broker)

        own_servers.kill("rabbitmq")
        own_servers.url("rabbitmq")

        first = take(broker)
        broker.ack(stale)
        broker.ack(first)
        second = take(broker)
        broker.ack(second)
        assert [first.body, second.body] == [b"1", b"2"]
        assert first.redelivered
        wait_until(broker.connected, "it is connected again")
        broker.publish([Outgoing(queue, b"3")]).wait(WAIT_S)
        assert take(broker).body == b"3"


def test_a_silent_server_costs_the_deadline_and_no_more(
    own_servers: PrivateServers, runs_in_taker: bool
) -> None:
    queue = "cellpipe.test.silence"
    url = own_servers.url("rabbitmq")
    with closing(
        RabbitmqBroker.connect(url, confirm_timeout_s=0.5, runs_in_taker=runs_in_taker)
    ) as broker:
        broker.declare([QueueSpec(queue)])
        own_servers.freeze("rabbitmq")
        try:
            began = time.monotonic()

            confirm = broker.publish([Outgoing(queue, b"into the void")])

            with pytest.raises(ConfirmTimeout, match="may or may not"):
                confirm.wait(WAIT_S)
            assert 0.4 < time.monotonic() - began < 2.0
            began = time.monotonic()
            broker.close(grace_s=1.0)
            assert time.monotonic() - began < 2.0
        finally:
            own_servers.thaw("rabbitmq")


def test_no_server_is_one_clear_error_without_the_password() -> None:
    with closing(TcpProxy("127.0.0.1", 1)) as proxy:
        proxy.cut()

        with pytest.raises(BrokerUnavailable) as raised:
            RabbitmqBroker.connect(
                f"amqp://user:sesame@127.0.0.1:{proxy.port}/", connect_timeout_s=0.3
            )

    assert f"127.0.0.1:{proxy.port}" in str(raised.value)
    assert "sesame" not in str(raised.value)
    assert "infra/servers up" in raised.value.remedy


def test_a_wrong_password_is_reported_at_once(amqp_url: str) -> None:
    parts = urlsplit(amqp_url)

    with pytest.raises(ConfigError, match="guest") as raised:
        RabbitmqBroker.connect(f"amqp://guest:sesame@{parts.hostname}:{parts.port}/")

    assert "sesame" not in str(raised.value) + raised.value.remedy


def test_a_missing_virtual_host_is_reported_at_once(amqp_url: str) -> None:
    parts = urlsplit(amqp_url)

    with pytest.raises(ConfigError, match="nowhere"):
        RabbitmqBroker.connect(f"amqp://guest:guest@{parts.hostname}:{parts.port}/nowhere")


def test_properties_that_are_no_utf8_come_as_texts_and_go_back_as_they_came(
    broker: RabbitmqBroker, queue: str, amqp_url: str
) -> None:
    broker.declare([QueueSpec(queue)])
    broker.consume(queue, prefetch=1)
    raw = b"\xff\xfe\x80"  # correlation ids of some clients are the bytes of a UUID
    sent = pika.BasicProperties(
        content_type=raw, correlation_id=raw, reply_to=raw, message_id=raw, headers={raw: "x"}
    )
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        connection.channel().basic_publish("", queue, b"there", sent)

    delivery = take(broker)
    broker.ack(delivery)
    back = Outgoing(
        queue,
        b"back",
        content_type=delivery.content_type,
        correlation_id=delivery.correlation_id,
        reply_to=delivery.reply_to,
    )
    broker.cancel(queue)
    broker.publish([back]).wait(WAIT_S)
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        _, received, _ = connection.channel().basic_get(queue, auto_ack=True)

    texts = (delivery.content_type, delivery.correlation_id, delivery.reply_to)
    assert all(isinstance(text, str) for text in texts)
    assert delivery.headers == ()
    assert (received.content_type, received.correlation_id, received.reply_to) == (raw, raw, raw)


class RawHeaders(pika.BasicProperties):  # type: ignore[misc]
    """A header "a" of any bytes, and a correlation id: what pika would not send."""

    def __init__(self, value: bytes) -> None:
        super().__init__()
        self._value = value

    def encode(self) -> list[bytes]:
        table = b"\x01a" + self._value
        flags = self.FLAG_CONTENT_TYPE | self.FLAG_HEADERS | self.FLAG_CORRELATION_ID
        lengths = struct.pack(">L", len(table))
        return [struct.pack(">H", flags), b"\x05a/b/c", lengths, table, b"\x04mine"]


def nested(depth: int) -> bytes:
    value = b"t\x01"
    for _ in range(depth):
        value = b"A" + struct.pack(">L", len(value)) + value
    return value


@pytest.mark.parametrize(
    "value",
    [
        b"T" + struct.pack(">Q", 1_790_000_000_000),  # milliseconds, where seconds belong
        b"T" + b"\xff" * 8,
        nested(2_000),
    ],
    ids=["milliseconds", "huge time", "nested"],
)
def test_headers_that_cannot_be_decoded_are_left_out_and_cost_no_connection(
    broker: RabbitmqBroker, queue: str, amqp_url: str, value: bytes
) -> None:
    broker.declare([QueueSpec(queue)])
    broker.consume(queue, prefetch=2)
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        connection.channel().basic_publish("", queue, b"there", RawHeaders(value))

    first = take(broker)
    broker.ack(first)
    broker.publish([Outgoing(queue, b"next", headers=(("b", "c"),))]).wait(WAIT_S)
    second = take(broker)
    broker.ack(second)

    assert (first.body, first.content_type, first.correlation_id) == (b"there", "a/b/c", "mine")
    assert (first.headers, first.redelivered) == ((), False)
    assert (second.body, second.headers) == (b"next", (("b", "c"),))
