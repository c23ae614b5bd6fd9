"""The memory broker against a model of what a queue is, under every order of calls."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shared.broker import MemoryBroker, MemoryHub
from shared.broker.base import Delivery, Outgoing
from shared.topology import QueueSpec

NUM_BROKERS = 2
PREFETCH = 3


class QueueMachine(RuleBasedStateMachine):
    """Two brokers on one queue with a dead-letter queue. Each message is in exactly one place:
    waiting (ready or in an inbox), taken, acked, or dead."""

    taken = Bundle("taken")
    settled = Bundle("settled")

    def __init__(self) -> None:
        super().__init__()
        self.hub = MemoryHub()
        self.brokers = [self.new_broker() for _ in range(NUM_BROKERS)]
        self.watcher = MemoryBroker(self.hub)
        self.num_sent = 0
        self.waiting: set[bytes] = set()
        self.was_given_back: set[bytes] = set()
        self.held: dict[bytes, int] = {}  # body -> index of the broker that took it
        self.num_dead = 0

    def new_broker(self) -> MemoryBroker:
        broker = MemoryBroker(self.hub)
        broker.declare([QueueSpec("dead"), QueueSpec("q", dead_letter_queue="dead")])
        broker.consume("q", prefetch=PREFETCH)
        return broker

    @rule()
    def publish(self) -> None:
        body = b"%d" % self.num_sent
        self.num_sent += 1
        self.watcher.publish([Outgoing("q", body)]).wait(0.0)
        self.waiting.add(body)

    @rule(target=taken, index=st.integers(0, NUM_BROKERS - 1))
    def take(self, index: int) -> tuple[int, MemoryBroker, Delivery | None]:
        delivery = self.brokers[index].take(0.0)
        if delivery is not None:
            assert delivery.body in self.waiting  # never twice at a time, never after an ack
            if delivery.redelivered:
                assert delivery.body in self.was_given_back
            self.waiting.discard(delivery.body)
            self.held[delivery.body] = index
        return index, self.brokers[index], delivery

    @rule(target=settled, what=consumes(taken))
    def ack(
        self, what: tuple[int, MemoryBroker, Delivery | None]
    ) -> tuple[MemoryBroker, Delivery] | None:
        index, broker, delivery = what
        if delivery is None:
            return None
        broker.ack(delivery)
        if broker is self.brokers[index]:  # else it is stale, and the ack is dropped
            del self.held[delivery.body]
        return broker, delivery

    @rule(target=settled, what=consumes(taken), requeue=st.booleans())
    def reject(
        self, what: tuple[int, MemoryBroker, Delivery | None], requeue: bool
    ) -> tuple[MemoryBroker, Delivery] | None:
        index, broker, delivery = what
        if delivery is None:
            return None
        broker.reject(delivery, requeue=requeue)
        if broker is self.brokers[index]:
            del self.held[delivery.body]
            if requeue:
                self.waiting.add(delivery.body)
                self.was_given_back.add(delivery.body)
            else:
                self.num_dead += 1
        return broker, delivery

    @rule(what=settled, is_ack=st.booleans())
    def settle_again(self, what: tuple[MemoryBroker, Delivery] | None, is_ack: bool) -> None:
        if what is not None and is_ack:
            what[0].ack(what[1])
        elif what is not None:
            what[0].reject(what[1], requeue=True)

    @rule(index=st.integers(0, NUM_BROKERS - 1))
    def close(self, index: int) -> None:
        self.was_given_back |= self.waiting  # what lay in its inbox counts as delivered
        self.brokers[index].close()
        self.brokers[index] = self.new_broker()
        back = {body for body, holder in self.held.items() if holder == index}
        self.held = {body: h for body, h in self.held.items() if h != index}
        self.waiting |= back
        self.was_given_back |= back

    @rule(index=st.integers(0, NUM_BROKERS - 1))
    def cancel_and_consume_again(self, index: int) -> None:
        self.was_given_back |= self.waiting
        self.brokers[index].cancel("q")
        self.brokers[index].consume("q", prefetch=PREFETCH)

    @invariant()
    def nothing_is_lost(self) -> None:
        assert self.watcher.depth("dead") == self.num_dead
        ready = self.watcher.depth("q")
        assert ready is not None
        assert ready <= len(self.waiting)
        # What is not ready waits in an inbox, and there it counts against a prefetch.
        assert len(self.waiting) - ready <= PREFETCH * NUM_BROKERS

    def teardown(self) -> None:
        for broker in self.brokers:
            broker.close()
        heir = MemoryBroker(self.hub)
        heir.consume("q", prefetch=10_000)
        remaining = set()
        while (delivery := heir.take(0.0)) is not None:
            remaining.add(delivery.body)
        assert remaining == self.waiting | set(self.held)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
