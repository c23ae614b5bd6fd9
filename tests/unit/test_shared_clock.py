"""Deadlines go by the store's clock: a machine whose own is wrong ends nobody's request."""

from __future__ import annotations

import time

import pytest

from shared.errors import StoreUnavailable
from shared.messages import Request
from shared.store.shared_clock import SharedClock
from tests.faults import Tripwire
from tests.rig import FakeClock, Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

HOUR_MS = 3_600_000
PROMPT = prompt_of(5)


class FixedTime:
    """The time of a store; `inner` does the rest."""

    def __init__(self, inner: object = None) -> None:
        self.unix_ms = 1_000_000
        self._inner = inner

    def now_unix_ms(self) -> int:
        return self.unix_ms

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_between_two_looks_it_goes_on_whatever_the_machines_date_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monotonic, store = FakeClock(), FixedTime()
    clock = SharedClock(store, monotonic_s=monotonic)  # type: ignore[arg-type]

    assert clock.unix_ms() == 1_000_000
    monotonic.sleep(2.5)
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    assert clock.unix_ms() == 1_002_500

    monotonic.sleep(10.0)
    store.unix_ms = 7_000_000
    assert clock.unix_ms() == 7_000_000


def test_a_store_that_does_not_answer_leaves_the_time_that_was_known() -> None:
    monotonic, store = FakeClock(), FixedTime()
    silent = Tripwire(store, "now_unix_ms", StoreUnavailable("no answer"), nth=2)
    clock = SharedClock(silent, monotonic_s=monotonic)  # type: ignore[arg-type]

    assert clock.unix_ms() == 1_000_000
    monotonic.sleep(20.0)

    assert clock.unix_ms() == 1_020_000


@pytest.mark.parametrize("wrong_by_ms", [24 * HOUR_MS, -24 * HOUR_MS])
def test_a_machine_with_a_wrong_date_ends_no_request_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch, wrong_by_ms: int
) -> None:
    right_ns = time.time_ns
    store_ms = right_ns() // 1_000_000
    monkeypatch.setattr(time, "time_ns", lambda: right_ns() + wrong_by_ms * 1_000_000)
    rig = Rig(2)
    ledger = FixedTime(rig.ledger)
    ledger.unix_ms = store_ms
    for group in range(2):
        rig.add_worker(group, ledger=ledger)
    rig.add_scheduler(ledger=ledger)

    rig.submit(
        Request("intime", token_ids=PROMPT, sampling=SAMPLED, deadline_unix_ms=store_ms + HOUR_MS)
    )
    rig.submit(Request("late", token_ids=PROMPT, sampling=SAMPLED, deadline_unix_ms=store_ms - 1))
    rig.run_until_quiet()
    rig.run_until_done("intime", "late")

    assert_answers(rig, [("intime", PROMPT, SAMPLED)])
    assert rig.record("late").error == "the request's deadline has passed"
