"""RabbitMQ: the promises of `base.py` over AMQP 0-9-1. The only package that imports pika.

    address        URL -> connection parameters
    io_loop        which thread runs pika's loop, and when
    link           connections that come back
    publisher      confirm mode, returns, deadlines
    ids            what a message's id says
    raw            pika alone, to compare with
    control        declare and depth
    subscriptions  consumers, inbox, settling

Two connections, because a broker that holds up publishers must not hold up acks. This module owns
the facade that other threads call; it knows the four parts and no AMQP method.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import structlog

from shared.broker.base import Confirm, Delivery, Outgoing
from shared.broker.rabbitmq.address import Address, parse_address
from shared.broker.rabbitmq.control import Control, refuse, resolve
from shared.broker.rabbitmq.io_loop import IoLoop
from shared.broker.rabbitmq.link import Connection, Link, describe, is_refusal
from shared.broker.rabbitmq.publisher import Publisher
from shared.broker.rabbitmq.subscriptions import Subscriptions
from shared.errors import BrokerUnavailable, ConfigError
from shared.topology import QueueSpec

log = structlog.get_logger()

T = TypeVar("T")

CONNECT_REMEDY = (
    "start the servers (infra/servers up), or point CELLPIPE_AMQP_URL to a RabbitMQ that runs"
)


class RabbitmqBroker:
    """A `Broker` on a RabbitMQ server, 3.10 to 4.x. Made by `connect`."""

    def __init__(
        self,
        address: Address,
        *,
        heartbeat_s: int,
        confirm_timeout_s: float,
        call_timeout_s: float,
        runs_in_taker: bool,
    ) -> None:
        self._address = address
        self._call_timeout_s = call_timeout_s
        self._closed = threading.Event()
        self._first_connect: Future[None] = Future()
        self._last_failure = "no answer"
        self._io = IoLoop(self._ended, runs_in_owner=runs_in_taker)
        self._publisher = Publisher(self._io, confirm_timeout_s, self._ready)
        self._control = Control()
        self._subscriptions = Subscriptions(self._io, self._redeclare)
        self._publish_link = Link(
            self._io,
            lambda: address.parameters("publish", heartbeat_s=heartbeat_s),
            # Queues first: what waits to be published may go to one that the broker has lost.
            on_up=lambda c: self._control.link_up(c, lambda: self._publisher.link_up(c)),
            on_down=self._publish_link_down,
            on_failed=self._connect_failed,
        )
        self._consume_link = Link(
            self._io,
            lambda: address.parameters("consume", heartbeat_s=heartbeat_s),
            on_up=self._consume_link_up,
            on_down=self._consume_link_down,
            on_failed=self._connect_failed,
        )

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        connect_timeout_s: float = 10.0,
        heartbeat_s: int = 10,
        confirm_timeout_s: float = 10.0,
        call_timeout_s: float = 10.0,
        runs_in_taker: bool = False,
    ) -> RabbitmqBroker:
        """Connect, trying again until `connect_timeout_s` has passed.

        `confirm_timeout_s` is the deadline of every publish: what is not sent by then never is.
        `call_timeout_s` bounds declare, consume, cancel and depth. With `runs_in_taker` the thread
        that takes does all IO while it waits, which spares two wake-ups a message: for a thread
        that no signal handler raises in. Raises `ConfigError` for a malformed URL or refused
        credentials, and `BrokerUnavailable` with host and port.
        """
        address = parse_address(url)
        # pika logs every lost connection as errors with tracebacks; we report each one once.
        logging.getLogger("pika").setLevel(logging.CRITICAL)
        broker = cls(
            address,
            heartbeat_s=heartbeat_s,
            confirm_timeout_s=confirm_timeout_s,
            call_timeout_s=call_timeout_s,
            runs_in_taker=runs_in_taker,
        )
        broker._start(connect_timeout_s)
        return broker

    def declare(self, queues: Sequence[QueueSpec]) -> None:
        answers: list[Future[int | None]] = [Future() for _ in queues]

        def declare_all() -> None:
            for spec, answer in zip(queues, answers, strict=True):
                self._control.declare(spec, answer)

        self._io.post(declare_all)
        for answer in answers:
            self._await(answer, "declare")

    def publish(self, messages: Sequence[Outgoing]) -> Confirm:
        return self._publisher.publish(messages)

    def consume(self, queue: str, *, prefetch: int) -> None:
        if not 1 <= prefetch <= 65535:
            raise ConfigError(f"prefetch of queue {queue} must be in 1..65535, got {prefetch}")
        answer: Future[None] = Future()
        self._io.post(lambda: self._subscriptions.consume(queue, prefetch, answer))
        self._await(answer, f"consume {queue}")

    def cancel(self, queue: str) -> None:
        answer: Future[None] = Future()
        self._io.post(lambda: self._subscriptions.cancel(queue, answer))
        self._await(answer, f"cancel {queue}")

    def take(self, timeout_s: float) -> Delivery | None:
        return self._subscriptions.take(timeout_s)

    def ack(self, delivery: Delivery) -> None:
        self._io.post_late(lambda: self._subscriptions.ack(delivery))

    def reject(self, delivery: Delivery, *, requeue: bool) -> None:
        self._io.post(lambda: self._subscriptions.reject(delivery, requeue=requeue))

    def depth(self, queue: str) -> int | None:
        answer: Future[int | None] = Future()
        self._io.post(lambda: self._control.depth(queue, answer))
        return self._await(answer, f"depth of {queue}")

    def connected(self) -> bool:
        return (
            not self._closed.is_set()
            and self._consume_link.is_up
            and self._publish_link.is_up
            and self._publisher.is_ready
        )

    def close(self, grace_s: float = 5.0) -> None:
        if self._closed.is_set():
            return
        deadline = time.monotonic() + grace_s
        self._closed.set()
        # What was posted before (acks, rejects) leaves first: the callbacks run in order.
        self._io.post(self._subscriptions.tell_acks)
        self._io.post(self._publish_link.close)
        self._io.post(self._consume_link.close)
        if not self._wait_for_goodbye(deadline - 0.2 * grace_s):
            self._io.post(self._publish_link.abort)
            self._io.post(self._consume_link.abort)
            self._wait_for_goodbye(deadline)
        self._io.stop(max(0.1, deadline - time.monotonic()))

    def _wait_for_goodbye(self, deadline: float) -> bool:
        """Whether both connections ended before the deadline."""
        publish, consume = self._publish_link.ended, self._consume_link.ended
        self._io.run_until(
            lambda: publish.is_set() and consume.is_set(), max(0.0, deadline - time.monotonic())
        )
        for link in (self._publish_link, self._consume_link):
            link.ended.wait(max(0.0, deadline - time.monotonic()))
        return self._publish_link.ended.is_set() and self._consume_link.ended.is_set()

    def _start(self, connect_timeout_s: float) -> None:
        until_s = time.monotonic() + connect_timeout_s
        self._io.post(self._publish_link.open)
        self._io.post(self._consume_link.open)
        self._io.start()
        self._io.run_until(self._first_connect.done, connect_timeout_s)
        try:
            self._first_connect.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            self.close(grace_s=1.0)
            raise BrokerUnavailable(
                f"no RabbitMQ at {self._address} within {connect_timeout_s:g} s:"
                f" {self._last_failure}",
                remedy=CONNECT_REMEDY,
            ) from None
        except ConfigError:
            self.close(grace_s=1.0)
            raise

    def _await(self, answer: Future[T], what: str) -> T:
        """Wait for the loop's answer. Raises `BrokerUnavailable` after `call_timeout_s`."""
        if self._closed.is_set():
            raise BrokerUnavailable("the broker is closed")
        until_s = time.monotonic() + self._call_timeout_s
        self._io.run_until(answer.done, self._call_timeout_s)
        try:
            return answer.result(max(0.0, until_s - time.monotonic()))
        except TimeoutError:
            answer.cancel()
            raise BrokerUnavailable(
                f"RabbitMQ at {self._address} did not answer within {self._call_timeout_s:g} s"
                f" ({what}): {self._last_failure}",
                remedy=CONNECT_REMEDY,
            ) from None

    def _redeclare(self, queue: str, then: Callable[[], None]) -> None:
        spec = self._control.declared.get(queue)
        if spec is None:
            then()
            return
        answer: Future[int | None] = Future()
        answer.add_done_callback(lambda _: then())
        self._control.declare(spec, answer)

    def _consume_link_up(self, connection: Connection) -> None:
        self._subscriptions.link_up(connection)
        self._ready()

    def _ready(self) -> None:
        """Called when either half is ready."""
        if self._publisher.is_ready and self._consume_link.is_up:
            log.info("broker_connected", address=str(self._address))
            resolve(self._first_connect, None)

    def _publish_link_down(self, reason: str) -> None:
        self._control.link_down()
        self._publisher.link_down(reason)
        self._report_loss("publish", reason)

    def _consume_link_down(self, reason: str) -> None:
        self._subscriptions.link_down()
        self._report_loss("consume", reason)

    def _report_loss(self, role: str, reason: str) -> None:
        self._last_failure = reason
        if not self._closed.is_set():
            log.warning("broker_lost", role=role, address=str(self._address), reason=reason)

    def _connect_failed(self, error: BaseException) -> None:
        self._last_failure = describe(error)
        if is_refusal(error):
            refuse(
                self._first_connect,
                ConfigError(
                    f"RabbitMQ at {self._address} refused user {self._address.credentials.username}"
                    f" or virtual host {self._address.virtual_host}: {self._last_failure}",
                    remedy="check user, password and virtual host in CELLPIPE_AMQP_URL",
                ),
            )

    def _ended(self) -> None:
        """On the loop's thread as its last act, after `close` or after a bug in a callback."""
        self._closed.set()
        self._publisher.close()
        self._subscriptions.close()
        refuse(self._first_connect, BrokerUnavailable("the connection was closed"))
