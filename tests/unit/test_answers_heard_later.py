"""Where all steps of a turn stay, their commits' answers are read after the next computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.admission import first_step
from services.worker.verdict import TOKEN_IDS
from shared.errors import StoreDamaged, StoreUnavailable
from shared.messages import FinishReason
from shared.store.ledger_types import Commit, CommitResult, Committed, Gap
from tests.faults import Crash, Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, prompt_of
from tests.unit.test_steps_sent_ahead import LateLedger, Results

PROMPT = prompt_of(21)
LONG = replace(SAMPLED, max_tokens=24)
ASKED = [
    ("a", PROMPT, LONG),
    ("b", prompt_of(5, salt=1), replace(GREEDY, max_tokens=24)),
    ("c", prompt_of(9, salt=2), replace(LONG, frequency_penalty=0.4)),
]


def finish(rig: Rig) -> None:
    rig.run_until_done(*(request_id for request_id, _, _ in ASKED))
    rig.run_until_quiet()
    assert_answers(rig, ASKED)
    assert rig.num_dead() == rig.num_steps() == 0


def start(rig: Rig) -> None:
    for request_id, prompt, sampling in ASKED:
        rig.start(request_id, prompt, sampling)


class NotedGroup:
    """A layer group that notes each computation."""

    def __init__(self, inner: Any, noted: list[str]) -> None:
        self._inner = inner
        self._noted = noted

    def forward(self, rows: Any, sequences: Any) -> Any:
        self._noted.append("compute")
        return self._inner.forward(rows, sequences)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_the_next_step_is_computed_before_the_answer_is_read() -> None:
    rig = Rig(1)
    noted: list[str] = []

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        noted.append("answer")
        return answer()

    rig.add_worker(
        ledger=LateLedger(rig.ledger, wait),
        layer_groups={0: NotedGroup(rig.layer_group(0), noted)},
    )
    sampling = replace(SAMPLED, max_tokens=6)
    rig.start("r", prompt_of(5), sampling)
    rig.run_until_done("r")

    # the prompt's answer is waited for, as is that of the last token, which ends the request
    assert noted == [
        "compute", "answer", "compute", "compute", "answer", "compute", "answer", "compute",
        "answer", "compute", "answer", "answer",
    ]  # fmt: skip
    assert_answers(rig, [("r", prompt_of(5), sampling)])


@pytest.mark.parametrize("is_made", [False, True], ids=["lost", "made"])
@pytest.mark.parametrize("num_losses", [1, 3])
@pytest.mark.parametrize("nth", range(2, 9, 2))
def test_answers_that_do_not_come_only_delay(nth: int, num_losses: int, is_made: bool) -> None:
    rig = Rig(1)
    calls = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal calls
        calls += 1
        if not nth <= calls < nth + num_losses:
            return answer()
        if is_made:
            answer()
        raise StoreUnavailable("gone")

    rig.add_worker(0, ledger=LateLedger(rig.ledger, wait))

    start(rig)
    finish(rig)


@pytest.mark.parametrize("nth", range(2, 12))
def test_a_worker_that_dies_before_it_reads_an_answer_changes_no_token(nth: int) -> None:
    rig = Rig(1)
    calls = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal calls
        calls += 1
        results = answer()
        if calls == nth:
            raise Crash
        return results

    rig.add_worker(0, ledger=LateLedger(rig.ledger, wait))
    rig.add_worker(0)

    start(rig)
    finish(rig)

    assert rig.num_crashes == 1


@pytest.mark.parametrize("nth", range(2, 8))
def test_a_request_that_ends_meanwhile_ends_here_and_leaves_nothing(nth: int) -> None:
    rig = Rig(1)
    calls = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal calls
        calls += 1
        if calls == nth:
            rig.ledger.finish("a", FinishReason.ABORT)
        return answer()

    worker = rig.add_worker(0, ledger=LateLedger(rig.ledger, wait))
    start(rig)
    rig.run_until_done(*(request_id for request_id, _, _ in ASKED))
    rig.run_until_quiet()

    assert_answers(rig, ASKED[1:])
    assert [final.finish_reason for final in rig.final_events("a")] == ["abort"]
    assert rig.num_steps() == rig.num_dead() == worker.num_pending == 0


@pytest.mark.parametrize("moment", range(10, 14))
def test_a_step_of_a_new_epoch_does_not_fail_over_the_end_of_the_old_one(moment: int) -> None:
    # given a request that is driven again while it goes on
    rig = Rig(1)
    broker = Tripwire(rig.new_broker(), "reject", Crash)
    worker = rig.add_worker(0, broker=broker)
    plan = rig.admit("a", PROMPT, LONG)
    first = first_step(plan, rig.layout, epoch=0)
    rig.publish_step(first)
    rig.run_until(lambda: len(rig.tokens("a")) == moment)
    rig.ledger.advance_epoch("a", 0, 1)
    text = np.array([*PROMPT, *rig.tokens("a")], np.int32)
    position = rig.num_kv_rows("a")[0]
    rig.publish_step(
        replace(first, epoch=1, position=position, tensors={TOKEN_IDS: text[position:]})
    )

    rig.run_until_done("a")
    rig.run_until_quiet()

    assert broker.num_calls == worker.num_pending == 0
    assert_answers(rig, ASKED[:1])


@pytest.mark.parametrize("nth", [2, 4, 6])  # what left by its queue is the scheduler's to drive
def test_a_commit_that_was_lost_is_made_good_from_what_it_followed_from(nth: int) -> None:
    # given a store that forgets what it confirmed, as one does that lost its last second
    rig = Rig(1)
    calls = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal calls
        calls += 1
        if calls == nth:
            return [Committed() for _ in commits]
        return answer()

    rig.add_worker(0, ledger=LateLedger(rig.ledger, wait))

    start(rig)
    finish(rig)


@pytest.mark.parametrize(
    "result", [Gap(0), StoreDamaged("garbled")], ids=lambda result: type(result).__name__
)
def test_an_answer_that_was_not_expected_ends_what_stays_and_no_more(
    result: CommitResult | StoreDamaged,
) -> None:
    rig = Rig(1)
    calls = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal calls
        calls += 1
        results = answer()
        return [result, *results[1:]] if calls == 4 else results

    rig.add_worker(0, ledger=LateLedger(rig.ledger, wait))

    start(rig)
    finish(rig)
