"""The broker inside one process: the promises of `base.py` without a server.

Owns queues in memory, shared by every `MemoryBroker` of one `MemoryHub`, so that threads can play
the part of processes. Knows no socket, no durability (`persistent` has no effect) and no message
format. One lock per hub; a waiting `take` sleeps on a condition of that lock, nothing polls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shared.broker.base import Confirm, Delivery, Outgoing, refuse_oversized
from shared.errors import (
    BrokerUnavailable,
    CellpipeError,
    ConfigError,
    PublishRefused,
    TransientError,
    Unroutable,
)
from shared.topology import QueueSpec


@dataclass(slots=True, eq=False)
class _Message:
    """A message in the hub. `sequence` is its place in its queue, kept when it comes back."""

    sequence: int
    outgoing: Outgoing
    num_returns: int = 0


@dataclass(slots=True, eq=False)
class _Queue:
    spec: QueueSpec
    ready: deque[_Message] = field(default_factory=deque)
    consumers: deque[_Consumer] = field(default_factory=deque)


@dataclass(slots=True, eq=False)
class _Consumer:
    """One broker's subscription; `held` is what it was given and has not settled, by delivery."""

    broker: MemoryBroker
    queue: _Queue
    prefetch: int
    held: dict[int, _Message] = field(default_factory=dict)


class MemoryHub:
    """The queues that its brokers share. All methods expect the caller to hold `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queues: dict[str, _Queue] = {}
        self._next_sequence = 0
        self._next_delivery = 0

    def publish(self, outgoing: Outgoing) -> TransientError | None:
        """Queue one message and hand it out if a consumer has room; the refusal, if any."""
        queue = self.queues.get(outgoing.queue)
        if queue is None:
            return Unroutable(f"queue {outgoing.queue} does not exist")
        limit = queue.spec.max_length
        self._next_sequence += 1
        queue.ready.append(_Message(self._next_sequence, outgoing))
        self.dispatch(queue)
        if limit is not None and len(queue.ready) > limit:
            queue.ready.pop()
            return PublishRefused(f"queue {outgoing.queue} is full ({limit} messages)")
        return None

    def dispatch(self, queue: _Queue) -> None:
        """Hand ready messages to consumers that have room, in turn."""
        num_full = 0
        while queue.ready and num_full < len(queue.consumers):
            consumer = queue.consumers[0]
            queue.consumers.rotate(-1)
            if len(consumer.held) >= consumer.prefetch:
                num_full += 1
                continue
            num_full = 0
            message = queue.ready.popleft()
            self._next_delivery += 1
            consumer.held[self._next_delivery] = message
            consumer.broker.hand_over(consumer, self._next_delivery, message)

    def give_back(self, queue: _Queue, messages: Iterable[_Message]) -> None:
        """Put messages back at their old places, or dead-letter those returned too often."""
        limit = queue.spec.delivery_limit
        for message in messages:
            message.num_returns += 1
            if limit is not None and message.num_returns > limit:
                self.dead_letter(queue, message)
                continue
            place = 0
            while place < len(queue.ready) and queue.ready[place].sequence < message.sequence:
                place += 1
            queue.ready.insert(place, message)
        self.dispatch(queue)

    def dead_letter(self, queue: _Queue, message: _Message) -> None:
        """Move a message to the dead-letter queue; without one it is dropped, as in RabbitMQ."""
        if queue.spec.dead_letter_queue is None:
            return
        sent = message.outgoing
        self.publish(
            Outgoing(
                queue.spec.dead_letter_queue,
                sent.body,
                sent.persistent,
                sent.content_type,
                sent.correlation_id,
                sent.reply_to,
            )
        )


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
        self._consumers: dict[str, _Consumer] = {}
        # Cancelled, but with deliveries that were taken and may still be settled.
        self._draining: list[_Consumer] = []
        self._closed = False

    def declare(self, queues: Sequence[QueueSpec]) -> None:
        with self._hub.lock:
            self._require_open()
            for spec in queues:
                existing = self._hub.queues.setdefault(spec.name, _Queue(spec))
                if existing.spec != spec:
                    raise ConfigError(
                        f"queue {spec.name} exists with other arguments:"
                        f" {existing.spec}, wanted {spec}"
                    )

    def publish(self, messages: Sequence[Outgoing]) -> Confirm:
        refuse_oversized(messages)
        with self._hub.lock:
            if self._closed:
                return _Settled(BrokerUnavailable("the broker is closed"))
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
            consumer = _Consumer(self, existing, prefetch)
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
        with self._arrived:
            if not self._inbox and not self._closed:
                self._arrived.wait_for(lambda: self._inbox or self._closed, timeout_s)
            if self._closed:
                raise BrokerUnavailable("the broker is closed")
            return self._inbox.popleft() if self._inbox else None

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

    def hand_over(self, consumer: _Consumer, number: int, message: _Message) -> None:
        """For the hub, which holds the lock: a message for this broker's `take`."""
        sent = message.outgoing
        self._inbox.append(
            Delivery(
                sent.queue,
                sent.body,
                message.num_returns > 0,
                sent.content_type,
                sent.correlation_id,
                sent.reply_to,
                (consumer, number),
            )
        )
        self._arrived.notify()

    def _release(self, delivery: Delivery) -> _Message | None:
        """End a delivery's hold on its message; None when it has none any more."""
        consumer, number = delivery.tag
        message: _Message | None = consumer.held.pop(number, None)
        if consumer in self._draining and not consumer.held:
            self._draining.remove(consumer)
        return message

    def _detach(self, consumer: _Consumer) -> None:
        """No further messages for this consumer."""
        consumer.queue.consumers.remove(consumer)

    def _require_open(self) -> None:
        if self._closed:
            raise BrokerUnavailable("the broker is closed")
