"""The last group sends the next step beside its token's commit, and reads the answer afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.worker.endings import EARLY_LIMIT_S
from shared.broker.base import Outgoing
from shared.broker.memory import MemoryBroker
from shared.errors import StoreDamaged, StoreUnavailable
from shared.messages import FinishReason, Request
from shared.store.kv_pages import PAGE_ROWS
from shared.store.ledger import Ledger
from shared.store.ledger_types import Commit, CommitResult, Gap
from shared.store.leftovers import leftover_keys
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

PROMPT = prompt_of(30)

Results = list[CommitResult | StoreDamaged]


class LateLedger:
    """A ledger whose commits are answered, or made, when a test says so."""

    def __init__(
        self, inner: Ledger, wait: Callable[[Sequence[Commit], Callable[[], Results]], Results]
    ) -> None:
        """`wait` is asked for the answer to commits, and may call the real one."""
        self._inner = inner
        self._wait = wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start_commits(self, commits: Sequence[Commit]) -> Callable[[], Results]:
        return lambda: self._wait(commits, lambda: self._inner.start_commits(commits)())


class NotingBroker:
    """Notes each step that is published."""

    def __init__(self, inner: MemoryBroker, noted: list[str]) -> None:
        self._inner = inner
        self._noted = noted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, messages: Sequence[Outgoing]) -> Any:
        self._noted += ["step" for _ in messages]
        return self._inner.publish(messages)


def test_the_next_step_leaves_before_the_answer_where_the_token_before_came_from_here() -> None:
    rig = Rig(2)
    noted: list[str] = []

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        noted.append("answer")
        return answer()

    rig.add_worker(0)
    rig.add_worker(
        1, ledger=LateLedger(rig.ledger, wait), broker=NotingBroker(rig.new_broker(), noted)
    )

    rig.start("r", PROMPT, SAMPLED)
    rig.run_until_done("r")

    assert noted[:6] == ["answer", "step", "step", "answer", "step", "answer"]
    assert noted[-1] == "answer"  # nothing follows the last token
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_request_that_ends_meanwhile_leaves_no_step_behind() -> None:
    rig = Rig(2)

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        if len(rig.tokens("r")) == 5:
            rig.ledger.finish("r", FinishReason.ABORT)
        return answer()

    rig.add_worker(0)
    rig.add_worker(1, ledger=LateLedger(rig.ledger, wait))

    rig.start("r", PROMPT, SAMPLED)
    rig.run_until_done("r")
    rig.run_until_quiet()

    assert len(rig.tokens("r")) == 5
    assert rig.num_steps() == 0
    assert rig.num_dead() == 0


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 2, 3])  # before, at and after the end of a page
def test_a_request_that_ends_meanwhile_leaves_no_rows_behind(
    num_tokens: int, num_groups: int
) -> None:
    rig = Rig(num_groups)
    rig.add_workers()
    rig.add_scheduler()

    rig.submit(Request("r", token_ids=prompt_of(PAGE_ROWS - 2), sampling=SAMPLED))
    rig.run_until(lambda: rig.ledger.get("r") is not None)
    rig.run_until(lambda: len(rig.tokens("r")) == num_tokens)
    rig.ledger.finish("r", FinishReason.ABORT)
    rig.run_until_quiet()

    assert leftover_keys(rig.stores, "r") == []


@pytest.mark.parametrize("num_losses", [1, 3])
def test_answers_that_do_not_come_only_delay(num_losses: int) -> None:
    # given commits that are made, or not, before the store goes away
    rig = Rig(2)
    calls = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal calls
        calls += 1
        if 3 <= calls < 3 + num_losses:
            raise StoreUnavailable("gone")
        results = answer()
        if calls == 6 + num_losses:
            raise StoreUnavailable("gone after it")
        return results

    rig.add_worker(0)
    rig.add_worker(1, ledger=LateLedger(rig.ledger, wait))

    rig.start("r", PROMPT, SAMPLED)
    rig.run_until_done("r")
    rig.run_until_quiet()

    assert calls > 6 + num_losses
    assert_answers(rig, [("r", PROMPT, SAMPLED)])
    assert rig.num_dead() == 0


def test_a_step_that_is_early_is_looked_at_again() -> None:
    rig = Rig(2)
    num_gaps = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal num_gaps
        if len(rig.tokens("r")) == 4 and num_gaps < 3:
            num_gaps += 1
            return [Gap(commits[0].position - 2)]
        return answer()

    rig.add_worker(0)
    rig.add_worker(1, ledger=LateLedger(rig.ledger, wait))

    rig.start("r", PROMPT, SAMPLED)
    rig.run_until_done("r")
    rig.run_until_quiet()

    assert num_gaps == 3
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_step_whose_predecessors_never_come_is_dropped_for_the_scheduler_to_drive() -> None:
    rig = Rig(2)

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        return [Gap(commits[0].position - 2)] if rig.tokens("r") else answer()

    rig.add_worker(0)
    rig.add_worker(1, ledger=LateLedger(rig.ledger, wait))
    rig.start("r", PROMPT, SAMPLED)
    rig.run_until(lambda: len(rig.tokens("r")) == 1)
    began_s = rig.clock()

    rig.run_until(lambda: rig.num_steps() == 0)

    assert EARLY_LIMIT_S <= rig.clock() - began_s < 2 * EARLY_LIMIT_S
    assert rig.num_dead() == 0


def test_a_step_that_is_early_is_followed_by_one_step_however_often_it_is_looked_at() -> None:
    # given a store that lost its last second: the tokens that this worker put on record are gone
    rig = Rig(1)
    noted: list[str] = []
    num_lost = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal num_lost
        if len(rig.tokens("r")) < 4:
            return answer()
        num_lost = num_lost or len(noted)
        return [Gap(commits[0].position - 2)]

    rig.add_worker(
        0, ledger=LateLedger(rig.ledger, wait), broker=NotingBroker(rig.new_broker(), noted)
    )
    rig.start("r", PROMPT, SAMPLED)

    rig.run_until(lambda: rig.num_steps() == 0)

    assert len(noted) == num_lost
    assert len(rig.tokens("r")) == 4


@pytest.mark.parametrize("changes", [{}, {"frequency_penalty": 0.3}], ids=["plain", "shaped"])
def test_a_step_whose_predecessor_is_made_good_elsewhere_waits_for_it(
    changes: dict[str, Any],
) -> None:
    # given a worker that loses its store while a commit is on its way: another, slow one has the
    # step again, and what was sent ahead of it comes back to the first one
    sampling = replace(SAMPLED, **changes)
    rig = Rig(2)
    num_lost = 0

    def wait(commits: Sequence[Commit], answer: Callable[[], Results]) -> Results:
        nonlocal num_lost
        if len(rig.tokens("r")) == 4 and num_lost == 0:
            num_lost += 1
            line.cancel(rig.queue(1))  # what it hands back is for the other
            raise StoreUnavailable("gone")
        return answer()

    line = rig.new_broker()
    rig.add_worker(0)
    rig.add_worker(1, ledger=LateLedger(rig.ledger, wait), broker=line)
    rig.start("r", PROMPT, sampling)
    rig.run_until(lambda: len(rig.tokens("r")) == 3)
    slow = rig.freeze(rig.add_worker(1))
    rig.run_until(lambda: num_lost == 1)

    for _ in range(10):
        rig.turn()
    assert len(rig.tokens("r")) == 4
    rig.thaw(slow)
    rig.run_until_done("r")

    assert_answers(rig, [("r", PROMPT, sampling)])
