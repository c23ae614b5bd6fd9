"""What only a broker behind a network can get wrong: lost connections, silence, restarts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pika
import pytest

from shared.broker.base import Broker, Delivery, Outgoing
from shared.broker.rabbitmq import RabbitmqBroker
from shared.errors import BrokerUnavailable, ConfigError, ConfirmTimeout
from shared.topology import QueueSpec
from tests.servers import PrivateServers
from tests.tcp_proxy import TcpProxy

pytestmark = pytest.mark.servers

WAIT_S = 20.0


@pytest.fixture
def queue(amqp_url: str) -> Iterator[str]:
    """A name; its queue is deleted at the end, after the broker that would declare it again."""
    name = f"cellpipe.test.{uuid.uuid4().hex}"
    yield name
    delete(amqp_url, name)


@pytest.fixture
def broker(amqp_url: str, queue: str) -> Iterator[RabbitmqBroker]:
    with closing(RabbitmqBroker.connect(amqp_url)) as broker:
        yield broker


@pytest.fixture
def proxy(amqp_url: str) -> Iterator[TcpProxy]:
    parts = urlsplit(amqp_url)
    with closing(TcpProxy(parts.hostname or "", parts.port or 0)) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: TcpProxy, queue: str) -> Iterator[RabbitmqBroker]:
    """A broker whose network the test can cut; confirms have 1 s."""
    url = f"amqp://guest:guest@127.0.0.1:{proxy.port}/%2F"
    with closing(RabbitmqBroker.connect(url, confirm_timeout_s=1.0)) as broker:
        yield broker


@pytest.fixture(scope="module")
def own_servers() -> Iterator[PrivateServers]:
    """Servers that a test may kill and freeze."""
    with closing(PrivateServers()) as servers:
        yield servers


def delete(url: str, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        connection.channel().queue_delete(queue)


def take(broker: Broker) -> Delivery:
    delivery = broker.take(WAIT_S)
    assert delivery is not None, "nothing was delivered"
    return delivery


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)


def test_a_lost_connection_restores_queues_and_consumers(
    proxied: RabbitmqBroker, proxy: TcpProxy, amqp_url: str, queue: str
) -> None:
    proxied.declare([QueueSpec(queue)])
    proxied.consume(queue, prefetch=1)
    proxy.cut()
    delete(amqp_url, queue)

    proxy.heal()

    wait_until(proxied.connected, "it is connected again")
    proxied.publish([Outgoing(queue, b"after")]).wait(WAIT_S)
    assert take(proxied).body == b"after"


def test_a_stale_ack_is_dropped_and_the_message_comes_again(
    proxied: RabbitmqBroker, proxy: TcpProxy, queue: str
) -> None:
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


def test_a_publish_without_connection_leaves_once_it_is_back(
    proxied: RabbitmqBroker, proxy: TcpProxy, queue: str
) -> None:
    proxied.declare([QueueSpec(queue)])
    proxy.cut()

    confirm = proxied.publish([Outgoing(queue, b"patient")])
    proxy.heal()

    confirm.wait(WAIT_S)
    assert proxied.depth(queue) == 1


def test_a_publish_that_missed_its_deadline_is_never_sent(
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


def test_what_waits_for_a_connection_is_bounded(
    proxied: RabbitmqBroker, proxy: TcpProxy, queue: str
) -> None:
    proxy.cut()
    body = bytes(8 << 20)

    confirms = [proxied.publish([Outgoing(queue, body)]) for _ in range(9)]

    with pytest.raises(BrokerUnavailable, match="wait for one already"):
        confirms[8].wait(WAIT_S)


def test_a_deleted_queue_is_declared_and_consumed_again(
    broker: RabbitmqBroker, amqp_url: str, queue: str
) -> None:
    broker.declare([QueueSpec(queue)])
    broker.consume(queue, prefetch=1)
    broker.publish([Outgoing(queue, b"lost with its queue")]).wait(WAIT_S)
    lost = take(broker)

    delete(amqp_url, queue)
    wait_until(lambda: broker.depth(queue) is not None, "it is declared again")
    broker.ack(lost)

    broker.publish([Outgoing(queue, b"after")]).wait(WAIT_S)
    assert take(broker).body == b"after"


def test_a_long_computation_keeps_the_connection(amqp_url: str, queue: str) -> None:
    with closing(RabbitmqBroker.connect(amqp_url, heartbeat_s=1)) as broker:
        broker.declare([QueueSpec(queue)])
        broker.consume(queue, prefetch=1)
        broker.publish([Outgoing(queue, b"long")]).wait(WAIT_S)
        delivery = take(broker)

        time.sleep(3.5)  # the "computation": a broker drops a peer silent for two heartbeats

        broker.ack(delivery)
        assert broker.take(0.1) is None  # a lost connection would deliver it again
        assert broker.connected()


def test_memory_is_flat_over_20_000_confirms(broker: RabbitmqBroker, queue: str) -> None:
    broker.declare([QueueSpec(queue)])
    broker.consume(queue, prefetch=200)

    def publish(num_messages: int) -> None:
        for _ in range(num_messages // 100):
            confirm = broker.publish([Outgoing(queue, bytes(2048))] * 100)
            for _ in range(100):
                broker.ack(take(broker))
            confirm.wait(WAIT_S)

    publish(4_000)
    before = resident_bytes()

    publish(20_000)

    assert resident_bytes() - before < 2 << 20  # 40 MB of bodies went through


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_killed_server_comes_back_with_all_it_confirmed(own_servers: PrivateServers) -> None:
    queue = "cellpipe.test.restart"
    with closing(RabbitmqBroker.connect(own_servers.url("rabbitmq"))) as broker:
        broker.declare([QueueSpec(queue)])
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


def test_a_silent_server_costs_the_deadline_and_no_more(own_servers: PrivateServers) -> None:
    queue = "cellpipe.test.silence"
    url = own_servers.url("rabbitmq")
    with closing(RabbitmqBroker.connect(url, confirm_timeout_s=0.5)) as broker:
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
