"""The queues of the memory broker: who gets which message, and when one moves on.

Owns order, prefetch, return, dead-lettering and time limits; knows no `Delivery`. The caller holds
the hub's lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from shared.broker.base import Outgoing
from shared.errors import PublishRefused, TransientError, Unroutable
from shared.topology import QueueSpec


class Receiver(Protocol):
    """What the hub needs of a broker that consumes."""

    def hand_over(self, consumer: HubConsumer, number: int, message: HubMessage) -> None:
        """A message for the broker's `take`."""

    def wake(self) -> None:
        """Look at the time again."""


@dataclass(slots=True, eq=False)
class HubMessage:
    """A message in the hub. `sequence` is its place in its queue, kept when it comes back."""

    sequence: int
    outgoing: Outgoing
    expires_at_s: float | None = None
    num_returns: int = 0
    first_queue: str = ""  # where it was before it was dead-lettered


@dataclass(slots=True, eq=False)
class HubQueue:
    spec: QueueSpec
    ready: deque[HubMessage] = field(default_factory=deque)
    consumers: deque[HubConsumer] = field(default_factory=deque)
    used_at_s: float = 0.0

    def is_over_limit(self) -> bool:
        max_length, max_bytes = self.spec.max_length, self.spec.max_bytes
        if max_length is not None and len(self.ready) > max_length:
            return True
        return max_bytes is not None and sum(len(m.outgoing.body) for m in self.ready) > max_bytes


@dataclass(slots=True, eq=False)
class HubConsumer:
    """One broker's subscription; `held` is what it was given and has not settled, by delivery."""

    broker: Receiver
    queue: HubQueue
    prefetch: int
    held: dict[int, HubMessage] = field(default_factory=dict)


class MemoryHub:
    """The queues that its brokers share. All methods expect the caller to hold `lock`.

    Time limits are kept by whoever looks next, by `clock` (seconds).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.queues: dict[str, HubQueue] = {}
        self._timed: list[HubQueue] = []  # those with a time limit
        self._next_sequence = 0
        self._next_delivery = 0

    def declare(self, spec: QueueSpec) -> HubQueue:
        """The queue of that name, used right now; a new one is made as `spec` says."""
        queue = self.queues.get(spec.name)
        if queue is None:
            queue = self.queues[spec.name] = HubQueue(spec)
            if spec.message_ttl_ms is not None or spec.expires_ms is not None:
                self._timed.append(queue)
        queue.used_at_s = self.clock()
        return queue

    def publish(self, outgoing: Outgoing, *, first_queue: str = "") -> TransientError | None:
        """Queue one message and hand it out if a consumer has room; the refusal, if any."""
        queue = self.queues.get(outgoing.queue)
        if queue is None and outgoing.instead:
            outgoing = replace(outgoing, queue=outgoing.instead, instead="")
            queue = self.queues.get(outgoing.queue)
        if queue is None:
            return Unroutable(f"queue {outgoing.queue} does not exist")
        ttl_ms = queue.spec.message_ttl_ms
        self._next_sequence += 1
        expires_at_s = None if ttl_ms is None else self.clock() + ttl_ms / 1000
        message = HubMessage(self._next_sequence, outgoing, expires_at_s, first_queue=first_queue)
        queue.ready.append(message)
        self.dispatch(queue)
        if not queue.ready:
            return None
        if ttl_ms is not None:
            self._announce_expiry(queue)
        if queue.is_over_limit():
            queue.ready.pop()
            return PublishRefused(f"queue {outgoing.queue} is full")
        return None

    def dispatch(self, queue: HubQueue) -> None:
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

    def give_back(self, queue: HubQueue, messages: Iterable[HubMessage]) -> None:
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
        if queue.ready and queue.spec.message_ttl_ms is not None:
            self._announce_expiry(queue)

    def dead_letter(self, queue: HubQueue, message: HubMessage) -> None:
        """Move a message to the dead-letter queue; without one it is dropped, as in RabbitMQ."""
        if queue.spec.dead_letter_queue is None:
            return
        self.publish(
            replace(message.outgoing, queue=queue.spec.dead_letter_queue, instead=""),
            first_queue=message.first_queue or queue.spec.name,
        )

    def keep_time(self) -> float | None:
        """Move on what waited too long, delete what nobody used; seconds until the next such."""
        if not self._timed:
            return None
        now_s = self.clock()
        soonest_s: float | None = None
        for queue in list(self._timed):
            while queue.ready and (at_s := queue.ready[0].expires_at_s) is not None:
                if at_s > now_s:
                    soonest_s = at_s if soonest_s is None else min(soonest_s, at_s)
                    break
                self.dead_letter(queue, queue.ready.popleft())
            expires_ms = queue.spec.expires_ms
            if queue.consumers:
                queue.used_at_s = now_s
            elif expires_ms is not None and now_s - queue.used_at_s >= expires_ms / 1000:
                del self.queues[queue.spec.name]
                self._timed.remove(queue)
        return None if soonest_s is None else soonest_s - now_s

    def _announce_expiry(self, queue: HubQueue) -> None:
        """Wake those who may get what waits here, so that they know until when to sleep."""
        heir = self.queues.get(queue.spec.dead_letter_queue or "")
        for consumer in heir.consumers if heir else ():
            consumer.broker.wake()
