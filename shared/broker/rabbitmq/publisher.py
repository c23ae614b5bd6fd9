"""Publishes in confirm mode and resolves each publish call's `Confirm`.

Owns the publish channel, what is in flight on it, and what waits for a connection. Knows no
consumer. All but `publish` runs within the loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pika
import pika.spec
import structlog

from shared.broker.base import Outgoing, refuse_oversized
from shared.broker.rabbitmq.ids import message_id, tag_of, unix_us
from shared.broker.rabbitmq.io_loop import IoLoop
from shared.broker.rabbitmq.link import Connection, describe
from shared.broker.rabbitmq.texts import to_wire
from shared.errors import (
    BrokerUnavailable,
    ConfirmTimeout,
    PublishRefused,
    TransientError,
    Unroutable,
)

log = structlog.get_logger()

# What may wait for a connection. Eight of the largest bodies, or thousands of decode steps.
MAX_WAITING_BYTES = 64 << 20


class PendingConfirm:
    """A `Confirm` that the loop resolves, once, when its last message is settled."""

    __slots__ = (
        "_claim", "_io", "_latch", "_sent", "_settled", "began_unix_us", "deadline", "error",
        "num_open",
    )  # fmt: skip

    def __init__(self, io: IoLoop, num_messages: int, deadline: float) -> None:
        self._io = io
        self.deadline = deadline  # of time.monotonic()
        self.began_unix_us = unix_us()
        self.num_open = num_messages
        self.error: TransientError | None = None
        self._sent = False
        self._settled = num_messages == 0
        self._claim = threading.Lock()  # makes "send" and "give up before it was sent" exclusive
        self._latch = threading.Lock()  # held until settled: the cheapest thing to wait on
        if not self._settled:
            self._latch.acquire()

    @property
    def is_settled(self) -> bool:
        return self._settled

    def wait(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        if not self._settled:
            self._io.run_until(lambda: self._settled, timeout_s)
        if not self._latch.acquire(timeout=max(0.0, until_s - time.monotonic())):
            self.give_up(f"not confirmed within {timeout_s:g} s")
        else:
            self._latch.release()
        if self.error is not None:
            raise self.error

    def claim(self) -> bool:
        """Before sending: whether somebody still waits for it. After this its fate is open."""
        with self._claim:
            self._sent = not self._settled
            return self._sent

    def settle_one(self, error: TransientError | None) -> None:
        self.error = self.error or error
        self.num_open -= 1
        if self.num_open == 0:
            with self._claim:
                self._release()

    def give_up(self, reason: str) -> None:
        """End the wait without an answer. What was not sent by now never will be."""
        with self._claim:
            if not self._settled:
                self.error = self.error or (
                    ConfirmTimeout(f"{reason}: the message may or may not be in its queue")
                    if self._sent
                    else BrokerUnavailable(f"{reason}: the message was not sent")
                )
                self._release()

    def _release(self) -> None:
        if not self._settled:
            self._settled = True
            self._latch.release()


class Publisher:
    """The publishing half of the broker."""

    def __init__(self, io: IoLoop, confirm_timeout_s: float, on_ready: Callable[[], None]) -> None:
        self._io = io
        self._on_ready = on_ready
        self._confirm_timeout_s = confirm_timeout_s
        self._connection: Connection | None = None
        self._channel: Any = None
        self._last_tag = 0
        self._in_flight: dict[int, tuple[PendingConfirm, Outgoing]] = {}  # in order of tag
        self._returned: dict[int, TransientError] = {}
        self._waiting: deque[tuple[PendingConfirm, Sequence[Outgoing]]] = deque()
        self._waiting_bytes = 0
        self._deadlines: deque[PendingConfirm] = deque()  # in order of deadline
        self._timer_runs = False
        self._closed = False

    @property
    def is_ready(self) -> bool:
        return self._channel is not None

    def publish(self, messages: Sequence[Outgoing]) -> PendingConfirm:
        """Any thread. The messages leave in order."""
        confirm = PendingConfirm(
            self._io, len(messages), time.monotonic() + self._confirm_timeout_s
        )
        refuse_oversized(messages)  # makes their bytes: the loop has enough to do
        if self._closed:
            confirm.give_up("the broker is closed")
        elif messages:
            self._io.post(lambda: self._accept(confirm, messages))
        return confirm

    def link_up(self, connection: Connection) -> None:
        self._connection = connection
        connection.channel(on_open_callback=self._channel_open)

    def link_down(self, reason: str) -> None:
        self._connection = None
        self._lose_channel(f"connection lost ({reason})")

    def close(self) -> None:
        """No confirm stays open; called when the loop ends, or from it."""
        self._closed = True
        for confirm, _ in (*self._in_flight.values(), *self._waiting):
            confirm.give_up("the broker was closed")
        for confirm in self._deadlines:
            confirm.give_up("the broker was closed")
        self._in_flight.clear()
        self._waiting.clear()

    def _accept(self, confirm: PendingConfirm, messages: Sequence[Outgoing]) -> None:
        while self._deadlines and self._deadlines[0].is_settled:
            self._deadlines.popleft()
        self._deadlines.append(confirm)
        if not self._timer_runs:
            self._timer_runs = True
            self._io.call_later(self._confirm_timeout_s, self._expire)
        if self._channel is not None:
            self._send(confirm, messages)
            return
        num_bytes = sum(len(message.body) for message in messages)
        if self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            confirm.give_up(f"no connection, and {self._waiting_bytes} bytes wait for one already")
            return
        self._waiting.append((confirm, messages))
        self._waiting_bytes += num_bytes

    def _send(self, confirm: PendingConfirm, messages: Sequence[Outgoing]) -> None:
        if confirm.claim():
            self._put_on_wire(confirm, messages)

    def _put_on_wire(self, confirm: PendingConfirm, messages: Sequence[Outgoing]) -> None:
        channel = self._channel
        for message in messages:
            self._last_tag += 1
            self._in_flight[self._last_tag] = (confirm, message)
            channel.basic_publish(
                "",
                to_wire(message.queue),
                message.body,
                pika.BasicProperties(
                    content_type=to_wire(message.content_type),
                    delivery_mode=2 if message.persistent else 1,
                    correlation_id=to_wire(message.correlation_id) or None,
                    reply_to=to_wire(message.reply_to) or None,
                    headers=dict(message.headers) if message.headers else None,
                    message_id=message_id(self._last_tag, confirm.began_unix_us),
                ),
                mandatory=True,  # else a confirm for a queue that does not exist means nothing
            )

    def _channel_open(self, channel: Any) -> None:
        channel.add_on_return_callback(self._on_return)
        channel.add_on_close_callback(self._on_channel_closed)

        def ready(_: Any) -> None:
            self._last_tag = 0
            self._channel = channel
            waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
            for confirm, messages in waiting:
                self._send(confirm, messages)
            self._on_ready()

        channel.confirm_delivery(self._on_confirm, callback=ready)

    def _on_channel_closed(self, channel: Any, error: BaseException) -> None:
        if self._connection is None or not self._connection.is_open:
            return  # link_down tells the rest
        log.warning("publish_channel_closed", reason=describe(error))
        self._lose_channel(f"channel closed ({describe(error)})")
        self._connection.channel(on_open_callback=self._channel_open)

    def _lose_channel(self, reason: str) -> None:
        self._channel = None
        lost, self._in_flight = self._in_flight, {}
        self._returned.clear()
        for confirm, _ in lost.values():
            confirm.give_up(reason)

    def _on_return(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        # Comes before the ack of the same message.
        self._returned[tag_of(properties.message_id)] = Unroutable(
            f"queue {method.routing_key} does not exist ({method.reply_text})"
        )

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        refused = isinstance(method, pika.spec.Basic.Nack)
        if not method.multiple:
            self._settle(method.delivery_tag, refused)
            return
        for tag in list(self._in_flight):
            if tag > method.delivery_tag:
                break
            self._settle(tag, refused)

    def _settle(self, tag: int, refused: bool) -> None:
        confirm, message = self._in_flight.pop(tag)
        error = self._returned.pop(tag, None)
        if error is not None and message.instead:
            again = replace(message, queue=message.instead, instead="")
            self._put_on_wire(confirm, [again])
            return
        if refused and error is None:
            error = PublishRefused(f"queue {message.queue} is full, or its broker refuses messages")
        confirm.settle_one(error)

    def _expire(self) -> None:
        """Give up on what is past its deadline; one timer serves all, for they are in order."""
        now = time.monotonic()
        while self._deadlines and (
            self._deadlines[0].is_settled or self._deadlines[0].deadline <= now
        ):
            confirm = self._deadlines.popleft()
            if not confirm.is_settled:
                confirm.give_up(f"not confirmed within {self._confirm_timeout_s:g} s")
        while self._waiting and self._waiting[0][0].is_settled:
            _, messages = self._waiting.popleft()
            self._waiting_bytes -= sum(len(message.body) for message in messages)
        self._timer_runs = bool(self._deadlines)
        if self._timer_runs:
            self._io.call_later(max(0.001, self._deadlines[0].deadline - now), self._expire)
