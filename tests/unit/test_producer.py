"""What a producer says when the pipeline says nothing."""

from __future__ import annotations

import time

import pytest

from services.cli.tree import EXIT_OVERLOADED, exit_code_of
from shared.broker.memory import MemoryBroker, MemoryHub
from shared.errors import Overloaded, RequestError, TransientError
from shared.messages import Request
from shared.producer import DEADLINE_GRACE_MS, Producer
from shared.topology import REQUESTS_QUEUE, QueueSpec
from tests.rig import Rig


def make_producer(rig: Rig) -> Producer:
    return Producer(rig.new_broker(), rig.ledger)


def test_an_end_that_does_not_come_is_given_up_after_the_deadline() -> None:
    producer = make_producer(Rig(1))
    deadline_unix_ms = time.time_ns() // 1_000_000 - DEADLINE_GRACE_MS - 1

    with pytest.raises(TransientError, match="deadline of request r"):
        next(producer.events("r", silence_s=0.001, deadline_unix_ms=deadline_unix_ms))


def test_a_request_that_is_too_large_is_refused_by_size() -> None:
    producer = make_producer(Rig(1))

    with pytest.raises(RequestError, match="over the limit"):
        producer.submit(Request("r", prompt="a" * (8 << 20)))


def test_a_full_queue_refuses_by_name_and_says_when_to_come_again() -> None:
    broker = MemoryBroker(MemoryHub())
    broker.declare([QueueSpec(REQUESTS_QUEUE, max_length=1)])
    producer = Producer(broker, Rig(1).ledger)
    producer.submit(Request("first", prompt="a"))

    with pytest.raises(Overloaded, match="no more requests for now") as raised:
        producer.submit(Request("second", prompt="a"))

    assert raised.value.retry_after_s > 0
    assert "try again in 5 s" in raised.value.remedy
    assert exit_code_of(raised.value) == EXIT_OVERLOADED
    assert broker.depth(REQUESTS_QUEUE) == 1
