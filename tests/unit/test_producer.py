"""What a producer says when the pipeline says nothing."""

from __future__ import annotations

import time

import pytest

from shared.errors import RequestError, TransientError
from shared.messages import Request
from shared.producer import DEADLINE_GRACE_MS, Producer
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
