"""Who runs pika's loop when, without a broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shared.broker.rabbitmq.io_loop import IoLoop
from shared.broker.rabbitmq.publisher import PendingConfirm
from shared.errors import BrokerUnavailable


@pytest.fixture
def io() -> Iterator[IoLoop]:
    """A loop that this thread owns."""
    io = IoLoop(lambda: None, runs_in_owner=True)
    io.start()
    yield io
    io.stop(1.0)


def test_a_wait_ends_in_time_however_long_its_thread_was_off_the_cpu(io: IoLoop) -> None:
    # given a thread that is held up right after it has set its alarm
    call_later: Callable[..., Any] = io.ioloop.call_later

    def held_up(delay_s: float, callback: Callable[[], None]) -> Any:
        alarm = call_later(delay_s, callback)
        time.sleep(0.01)
        return alarm

    io.ioloop.call_later = held_up
    began = time.monotonic()

    io.run_until(lambda: False, 0.05)

    assert 0.05 <= time.monotonic() - began < 1.0


def test_a_loop_that_was_stopped_meanwhile_runs_nothing_and_raises_nothing() -> None:
    io = IoLoop(lambda: None, runs_in_owner=True)
    io.start()
    ran: list[str] = []
    io.stop(1.0)  # by another thread, between two looks of the owner

    io.post_late(lambda: ran.append("late"))
    io.post(lambda: ran.append("posted"))
    io.run_until(lambda: False, 0.01)
    io.run_until(lambda: False, 0.0)

    assert ran == []


def test_a_confirm_that_does_not_come_names_the_time_that_was_given(io: IoLoop) -> None:
    confirm = PendingConfirm(io, 1, time.monotonic() + 10.0)

    with pytest.raises(BrokerUnavailable, match=r"not confirmed within 0\.05 s"):
        confirm.wait(0.05)
