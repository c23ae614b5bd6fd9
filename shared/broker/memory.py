"""The broker inside one process: the promises of `base.py` without a server.

The queues are in `memory_hub`, shared by every `MemoryBroker` of one `MemoryHub`, so that threads
can play the part of processes. Knows no socket, no durability (`persistent` has no effect) and no
message format. One lock per hub; a waiting `take` sleeps on a condition of it, nothing polls.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

from shared.broker.base import (
    MAX_BODY_BYTES,
    Confirm,
    Content,
    Delivery,
    Outgoing,
    refuse_oversized,
)
from shared.broker.memory_hub import HubConsumer, HubMessage, MemoryHub
from shared.errors import BrokerUnavailable, CellpipeError, ConfigError
from shared.topology import QueueSpec

__all__ = ["MemoryBroker", "MemoryHub"]


class _Settled:
    """A confirm whose fate is known at once."""

    __slots__ = ("_error",)

    def __init__(self, error: CellpipeError | None) -> None:
        self._error = error

    def wait(self, timeout_s: float) -> None:
        if self._error is not None:
            raise self._error


class MemoryBroker:
    """A `Broker` on a hub. Every method is safe from any thread; one thread takes."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub
        self._arrived = threading.Condition(hub.lock)
        self._inbox: deque[Delivery] = deque()
        self._consumers: dict[str, HubConsumer] = {}
        # Cancelled, but with deliveries that were taken and may still be settled.
        self._draining: list[HubConsumer] = []
        self._is_waiting = False  # in `take`; it mostly is not, and asking a condition costs more
        self._closed = False

    def declare(self, queues: Sequence[QueueSpec]) -> None:
        with self._hub.lock:
            self._require_open()
            self._hub.keep_time()
            for spec in queues:
                existing = self._hub.declare(spec)
                if existing.spec != spec:
                    raise ConfigError(
                        f"queue {spec.name} exists with other arguments:"
                        f" {existing.spec}, wanted {spec}"
                    )

    def publish(self, messages: Sequence[Outgoing]) -> Confirm:
        refuse_oversized([message for message in messages if _may_be_oversized(message.content)])
        with self._hub.lock:
            if self._closed:
                return _Settled(BrokerUnavailable("the broker is closed"))
            self._hub.keep_time()
            errors = [self._hub.publish(message) for message in messages]
        return _Settled(next((error for error in errors if error is not None), None))

    def consume(self, queue: str, *, prefetch: int) -> None:
        with self._hub.lock:
            self._require_open()
            if queue in self._consumers:
                raise ConfigError(f"queue {queue} is consumed already")
            existing = self._hub.queues.get(queue)
            if existing is None:
                raise ConfigError(f"queue {queue} does not exist", remedy="declare it first")
            consumer = HubConsumer(self, existing, prefetch)
            self._consumers[queue] = consumer
            existing.consumers.append(consumer)
            self._hub.dispatch(existing)

    def cancel(self, queue: str) -> None:
        with self._hub.lock:
            consumer = self._consumers.pop(queue, None)
            if consumer is None:
                return
            self._detach(consumer)
            untaken = [d.tag[1] for d in self._inbox if d.tag[0] is consumer]
            self._inbox = deque(d for d in self._inbox if d.tag[0] is not consumer)
            self._draining.append(consumer)
            self._hub.give_back(consumer.queue, [consumer.held.pop(number) for number in untaken])

    def take(self, timeout_s: float) -> Delivery | None:
        give_up_at_s: float | None = None
        with self._hub.lock:
            while True:
                next_expiry_s = self._hub.keep_time()
                if self._closed:
                    raise BrokerUnavailable("the broker is closed")
                if self._inbox:
                    return self._inbox.popleft()
                now_s = time.monotonic()
                if give_up_at_s is None:
                    give_up_at_s = now_s + timeout_s
                left_s = give_up_at_s - now_s
                if left_s <= 0:
                    return None
                self._is_waiting = True
                self._arrived.wait(left_s if next_expiry_s is None else min(left_s, next_expiry_s))
                self._is_waiting = False

    def ack(self, delivery: Delivery) -> None:
        with self._hub.lock:
            if self._release(delivery) is not None:
                self._hub.dispatch(delivery.tag[0].queue)

    def reject(self, delivery: Delivery, *, requeue: bool) -> None:
        with self._hub.lock:
            message = self._release(delivery)
            if message is None:
                return
            queue = delivery.tag[0].queue
            if requeue:
                self._hub.give_back(queue, [message])
            else:
                self._hub.dead_letter(queue, message)
                self._hub.dispatch(queue)

    def depth(self, queue: str) -> int | None:
        with self._hub.lock:
            self._require_open()
            self._hub.keep_time()
            existing = self._hub.queues.get(queue)
            return None if existing is None else len(existing.ready)

    def connected(self) -> bool:
        return not self._closed

    def close(self, grace_s: float = 5.0) -> None:
        with self._arrived:
            if self._closed:
                return
            self._closed = True
            self._inbox.clear()
            for consumer in self._consumers.values():
                self._detach(consumer)
            for consumer in (*self._consumers.values(), *self._draining):
                held = list(consumer.held.values())
                consumer.held.clear()  # what is settled from now on is dropped
                self._hub.give_back(consumer.queue, held)
            self._arrived.notify_all()

    def hand_over(self, consumer: HubConsumer, number: int, message: HubMessage) -> None:
        """For the hub, which holds the lock: a message for this broker's `take`."""
        sent = message.outgoing
        self._inbox.append(
            Delivery(
                sent.queue,
                sent.content,
                message.num_returns > 0,
                sent.content_type,
                sent.correlation_id,
                sent.reply_to,
                (consumer, number),
                sent.headers,
                message.first_queue,
            )
        )
        self.wake()

    def wake(self) -> None:
        """For the hub, which holds the lock: look at the time again."""
        if self._is_waiting:
            self._arrived.notify()

    def _release(self, delivery: Delivery) -> HubMessage | None:
        """End a delivery's hold on its message; None when it has none any more."""
        consumer, number = delivery.tag
        message: HubMessage | None = consumer.held.pop(number, None)
        if consumer in self._draining and not consumer.held:
            self._draining.remove(consumer)
        return message

    def _detach(self, consumer: HubConsumer) -> None:
        """No further messages for this consumer."""
        consumer.queue.consumers.remove(consumer)
        consumer.queue.used_at_s = self._hub.clock()

    def _require_open(self) -> None:
        if self._closed:
            raise BrokerUnavailable("the broker is closed")


def _may_be_oversized(content: Content) -> bool:
    return isinstance(content, bytes) or content.may_be_over(MAX_BODY_BYTES)
