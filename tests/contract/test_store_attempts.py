"""Marks on steps, in every variant of the store."""

from __future__ import annotations

from shared.store.attempts import ATTEMPTS_TTL_MS, Attempts, StepName
from shared.store.connection import Stores

STEP = StepName("r-1", "even2", 1, 17)


def test_a_process_sees_the_marks_of_others_and_not_its_own(stores: Stores) -> None:
    attempts = Attempts(stores.meta)

    assert attempts.begin(STEP, "a", now_unix_ms=1) == ()
    assert attempts.begin(STEP, "a", now_unix_ms=2) == ()
    assert attempts.begin(STEP, "c", now_unix_ms=3) == ("a",)
    assert attempts.begin(STEP, "b", now_unix_ms=4) == ("a", "c")


def test_a_mark_of_one_step_is_none_of_another(stores: Stores) -> None:
    attempts = Attempts(stores.meta)
    attempts.begin(STEP, "a", now_unix_ms=1)

    for other in (
        StepName("r-2", "even2", 1, 17),
        StepName("r-1", "even2", 0, 17),
        StepName("r-1", "even2", 1, 18),
    ):
        assert attempts.begin(other, "b", now_unix_ms=2) == ()


def test_a_process_that_outlived_its_attempt_takes_its_mark_back(stores: Stores) -> None:
    attempts = Attempts(stores.meta)
    attempts.begin(STEP, "a", now_unix_ms=1)
    attempts.begin(STEP, "b", now_unix_ms=2)

    attempts.end(STEP, "a")

    assert attempts.begin(STEP, "c", now_unix_ms=3) == ("b",)


def test_a_step_that_is_done_is_forgotten(stores: Stores) -> None:
    attempts = Attempts(stores.meta)
    attempts.begin(STEP, "a", now_unix_ms=1)

    attempts.forget(STEP)

    assert stores.meta.run(("EXISTS", STEP.key)) == 0


def test_marks_that_nobody_clears_go_by_themselves(stores: Stores) -> None:
    Attempts(stores.meta).begin(STEP, "a", now_unix_ms=1)

    assert 0 < stores.meta.run(("PTTL", STEP.key)) <= ATTEMPTS_TTL_MS
