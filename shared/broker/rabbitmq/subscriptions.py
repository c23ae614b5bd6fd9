"""Consumes queues: one channel each, deliveries of all in one inbox, settled on their channel.

A subscription lives as long as its channel; after a loss a new one takes its place, and deliveries
of the old one are dropped when they are settled, for the broker gives them out again. All but
`take` runs within the loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import structlog

from shared.broker.base import Delivery, Headers
from shared.broker.rabbitmq.control import NOT_FOUND, refuse, resolve
from shared.broker.rabbitmq.ids import sent_unix_us, unix_us
from shared.broker.rabbitmq.io_loop import IoLoop
from shared.broker.rabbitmq.link import Connection, backoff_s, describe
from shared.broker.rabbitmq.texts import from_wire
from shared.errors import BrokerUnavailable, ConfigError

log = structlog.get_logger()

BROKER_HEADERS = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")


@dataclass(slots=True, eq=False)
class _Subscription:
    """One consumer on one channel. `unsettled` holds delivery tags; `is_live` until it is lost."""

    queue: str
    prefetch: int
    channel: Any = None
    consumer_tag: str = ""
    is_live: bool = True
    is_draining: bool = False
    unsettled: set[int] = field(default_factory=set)
    acked: list[int] = field(default_factory=list)  # and the broker was not told yet
    answer: Future[None] | None = None


class Subscriptions:
    """The consuming half of the broker."""

    def __init__(self, io: IoLoop, redeclare: Callable[[str, Callable[[], None]], None]) -> None:
        """`redeclare(queue, then)` declares the queue again if we once did, and calls `then`."""
        self._io = io
        self._redeclare = redeclare
        self._connection: Connection | None = None
        self._wanted: dict[str, int] = {}  # queue -> prefetch
        self._active: dict[str, _Subscription] = {}
        self._num_losses: dict[str, int] = {}  # in a row, for the back-off
        self._arrived = threading.Condition(threading.Lock())
        self._inbox: deque[Delivery] = deque()
        self._closed = False
        self._to_tell: list[_Subscription] = []  # those with acks that the broker was not told
        io.before_flush.append(self.tell_acks)

    def consume(self, queue: str, prefetch: int, answer: Future[None]) -> None:
        """The answer comes when the broker agreed, or with a `ConfigError`."""
        if queue in self._wanted:
            refuse(answer, ConfigError(f"queue {queue} is consumed already"))
            return
        self._wanted[queue] = prefetch
        self._subscribe(queue, answer)

    def cancel(self, queue: str, answer: Future[None]) -> None:
        """The answer comes when nothing more can arrive and what was not taken is on its way."""
        self._wanted.pop(queue, None)
        subscription = self._active.pop(queue, None)
        if subscription is None or not subscription.consumer_tag or not self._is_open():
            if subscription is not None:
                self._lose(subscription)
            resolve(answer, None)
            if subscription is not None and subscription.channel is not None and self._is_open():
                subscription.channel.close()
            return

        def cancelled(_: Any) -> None:
            for delivery in self._forget(subscription):
                self.reject(delivery, requeue=True)
            subscription.is_draining = True
            self._close_if_drained(subscription)
            resolve(answer, None)

        subscription.channel.basic_cancel(subscription.consumer_tag, callback=cancelled)

    def take(self, timeout_s: float) -> Delivery | None:
        """Any one thread, which owns the loop then. Waits for the next delivery."""
        self._io.own()
        if not self._inbox and not self._closed:
            until_s = time.monotonic() + timeout_s
            self._io.run_until(lambda: bool(self._inbox or self._closed), timeout_s)
            timeout_s = until_s - time.monotonic()
        with self._arrived:
            if not self._inbox and not self._closed:
                self._arrived.wait_for(lambda: self._inbox or self._closed, timeout_s)
            if self._closed:
                raise BrokerUnavailable("the broker is closed")
            return self._inbox.popleft() if self._inbox else None

    def ack(self, delivery: Delivery) -> None:
        subscription, tag = delivery.tag
        if self._release(subscription, tag):
            if not subscription.acked:
                self._to_tell.append(subscription)
            subscription.acked.append(tag)

    def reject(self, delivery: Delivery, *, requeue: bool) -> None:
        subscription, tag = delivery.tag
        if self._release(subscription, tag):
            subscription.channel.basic_reject(tag, requeue=requeue)
            self._close_if_drained(subscription)

    def link_up(self, connection: Connection) -> None:
        self._connection = connection
        for queue in self._wanted:
            self._subscribe(queue)

    def link_down(self) -> None:
        self._connection = None
        for subscription in list(self._active.values()):
            self._lose(subscription)

    def close(self) -> None:
        """Wake a waiting `take`; nothing more is handed out."""
        with self._arrived:
            self._closed = True
            self._inbox.clear()
            self._arrived.notify_all()

    def _subscribe(self, queue: str, answer: Future[None] | None = None) -> None:
        if self._connection is None:
            if answer is not None:
                resolve(answer, None)  # remembered: link_up subscribes
            return
        if queue in self._active or queue not in self._wanted:
            return
        subscription = _Subscription(queue, self._wanted[queue], answer=answer)
        self._active[queue] = subscription

        def channel_open(channel: Any) -> None:
            subscription.channel = channel
            channel.add_on_close_callback(
                lambda _, error: self._on_channel_closed(subscription, error)
            )
            channel.add_on_cancel_callback(lambda _: self._on_cancelled(subscription))
            # Per consumer, not global: 4.x has no global one, and queues must not starve each other
            channel.basic_qos(prefetch_count=subscription.prefetch, callback=lambda _: consume())

        def consume() -> None:
            if not subscription.is_live:
                return  # cancelled meanwhile
            subscription.consumer_tag = subscription.channel.basic_consume(
                queue, self._receiver(subscription), callback=lambda _: self._agreed(subscription)
            )

        self._connection.channel(on_open_callback=channel_open)

    def _is_open(self) -> bool:
        """Not while it closes either: what was taken is then given out again by the broker."""
        return self._connection is not None and bool(self._connection.is_open)

    def _agreed(self, subscription: _Subscription) -> None:
        self._num_losses.pop(subscription.queue, None)
        if subscription.answer is not None:
            resolve(subscription.answer, None)

    def _receiver(self, subscription: _Subscription) -> Callable[..., None]:
        """The callback that turns pika's message into a `Delivery` in the inbox."""
        queue, unsettled = subscription.queue, subscription.unsettled

        def receive(_: Any, method: Any, properties: Any, body: bytes) -> None:
            tag = method.delivery_tag
            unsettled.add(tag)
            headers, handed_over_from = _read_headers(properties.headers)
            delivery = Delivery(
                queue,
                body,
                bool(method.redelivered),
                from_wire(properties.content_type),
                from_wire(properties.correlation_id),
                from_wire(properties.reply_to),
                (subscription, tag),
                headers,
                handed_over_from,
                sent_unix_us(from_wire(properties.message_id)),
                unix_us(),
            )
            with self._arrived:
                self._inbox.append(delivery)
                self._arrived.notify()

        return receive

    def _release(self, subscription: _Subscription, tag: int) -> bool:
        """Whether this delivery may be settled: once, and only while its channel lives."""
        if not subscription.is_live or tag not in subscription.unsettled:
            return False
        subscription.unsettled.discard(tag)
        return bool(subscription.channel.is_open)

    def tell_acks(self) -> None:
        """Acks of one burst: as one, up to the first delivery that is not settled."""
        to_tell, self._to_tell = self._to_tell, []
        for subscription in to_tell:
            tags, subscription.acked = sorted(subscription.acked), []
            if not subscription.is_live or not subscription.channel.is_open:
                continue
            oldest = min(subscription.unsettled, default=tags[-1] + 1)
            together = sum(tag < oldest for tag in tags)
            if together:
                subscription.channel.basic_ack(tags[together - 1], multiple=together > 1)
            for tag in tags[together:]:
                subscription.channel.basic_ack(tag)
            self._close_if_drained(subscription)

    def _close_if_drained(self, subscription: _Subscription) -> None:
        if subscription.unsettled or subscription.acked:
            return
        if subscription.is_draining and subscription.is_live:
            subscription.is_live = False
            if subscription.channel.is_open:
                subscription.channel.close()

    def _on_channel_closed(self, subscription: _Subscription, error: BaseException) -> None:
        if not subscription.is_live or not self._is_open():
            return  # our own doing, or link_down tells the rest
        self._lose(subscription)
        missing = getattr(error, "reply_code", 0) == NOT_FOUND
        if missing and subscription.answer is not None and not subscription.answer.done():
            self._wanted.pop(subscription.queue, None)
            refuse(
                subscription.answer,
                ConfigError(
                    f"queue {subscription.queue} does not exist", remedy="declare it first"
                ),
            )
            return
        self._come_back(subscription.queue, describe(error))

    def _on_cancelled(self, subscription: _Subscription) -> None:
        """The broker ended the consumer: its queue was deleted, or moved to another node."""
        if not subscription.is_live:
            return
        self._lose(subscription)
        if subscription.channel.is_open:
            subscription.channel.close()
        self._come_back(subscription.queue, "consumer cancelled by the broker")

    def _come_back(self, queue: str, reason: str) -> None:
        if queue not in self._wanted:
            return
        num_losses = self._num_losses.get(queue, 0)
        self._num_losses[queue] = num_losses + 1
        log.warning("consumer_lost", queue=queue, reason=reason)
        self._io.call_later(
            backoff_s(num_losses),
            lambda: self._redeclare(queue, lambda: self._subscribe(queue)),
        )

    def _lose(self, subscription: _Subscription) -> None:
        """From now on its deliveries are stale: out of the inbox, and dropped when settled."""
        subscription.is_live = False
        subscription.unsettled.clear()
        if self._active.get(subscription.queue) is subscription:
            del self._active[subscription.queue]
        self._forget(subscription)
        if subscription.answer is not None and self._connection is None:
            resolve(subscription.answer, None)  # remembered: link_up subscribes

    def _forget(self, subscription: _Subscription) -> list[Delivery]:
        """Take out of the inbox what belongs to a subscription."""
        with self._arrived:
            theirs = [d for d in self._inbox if d.tag[0] is subscription]
            if theirs:
                self._inbox = deque(d for d in self._inbox if d.tag[0] is not subscription)
        return theirs


def _read_headers(headers: Mapping[str | bytes, Any] | None) -> tuple[Headers, str]:
    """A delivery's headers and where it came from: ours are texts, the broker adds its own."""
    if not headers:
        return (), ""
    texts = tuple(
        (name, value)
        for name, value in headers.items()
        # pika leaves what is no UTF-8 as bytes, names too.
        if isinstance(name, str) and isinstance(value, str) and not name.startswith(BROKER_HEADERS)
    )
    first_queue = headers.get("x-first-death-queue")
    return texts, first_queue if isinstance(first_queue, str) else ""
