"""A worker ends what it cannot compute by name, and nothing else suffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.worker.limits import WorkerLimits
from shared.errors import KernelError, StoreUnavailable
from shared.kernel.weights import Logits
from shared.messages import FinishReason
from shared.store import keys
from shared.topology import DEAD_QUEUE
from tests.faults import Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, prompt_of
from tests.steps import OTHERS, a_step, finish_others, hidden, start_others, token_ids


@pytest.mark.parametrize("per_group", [1, 2])
def test_a_kernel_error_ends_its_request_alone(per_group: int) -> None:
    # given a step whose finite hidden state overflows in the first norm
    rig = Rig(2)
    rig.add_workers(per_group)
    start_others(rig)
    rig.admit("bad", (5,))

    rig.publish_step(a_step(rig, "bad", tensors=hidden(1e25)))
    finish_others(rig)

    (final,) = rig.final_events("bad")
    assert final.finish_reason == "error"
    assert "layer group 1 cannot compute it" in final.error
    assert rig.num_dead() == 1


class WildHead:
    """A layer group whose head fails for one last row; the same row alone fails again."""

    def __init__(self, inner: Any, is_bad: Callable[[npt.NDArray[np.float32]], bool]) -> None:
        self._inner = inner
        self._is_bad = is_bad

    def head(self, rows: npt.NDArray[np.float32]) -> Logits:
        if any(self._is_bad(row) for row in rows):
            raise KernelError("logits are not finite")
        return self._inner.head(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_a_head_that_fails_for_one_row_ends_its_request_alone() -> None:
    # given the last row of the prompt of "bad", which its head cannot turn into logits
    bad_prompt = prompt_of(7, salt=3)
    rig = Rig(1)
    inner = rig.layer_group(0)
    row = last_row(inner, bad_prompt)
    rig.add_worker(0, layer_groups={0: WildHead(inner, lambda r: np.array_equal(r, row))})

    start_others(rig)
    rig.start("bad", bad_prompt)
    finish_others(rig)

    (final,) = rig.final_events("bad")
    assert (final.finish_reason, final.num_generated) == ("error", 0)
    assert "logits are not finite" in final.error
    assert rig.num_dead() == 1


def last_row(layer_group: Any, prompt: tuple[int, ...]) -> npt.NDArray[np.float32]:
    from shared.model.layer_group import SequenceSlice

    rows = layer_group.embed(np.array(prompt, np.int32))
    piece = SequenceSlice(layer_group.new_cache(), 0, len(prompt))
    return layer_group.forward(rows, [piece])[-1]


def test_kv_rows_that_were_corrupted_end_their_request_alone() -> None:
    # given a worker that has to read its rows, one of which is NaN now
    rig = Rig(2)
    first = rig.add_worker(0)
    rig.add_worker(1)
    rig.start("bad", prompt_of(20))
    rig.run_until(lambda: len(rig.tokens("bad")) >= 3)
    rig.kill(first)
    key = keys.kv_page("bad", rig.layout.layout_id, 0, 0)
    rig.stores.kv.run(("SETRANGE", key, 64, b"\xff\xff"))

    rig.add_worker(0)
    start_others(rig)
    finish_others(rig)

    (final,) = rig.final_events("bad")
    assert final.finish_reason == "error"
    assert "not finite" in final.error
    assert rig.num_dead() == 1


@pytest.mark.parametrize("failures", [0, 2])
@pytest.mark.parametrize("group", [0, 1])
def test_a_deadline_that_has_passed_ends_the_request_before_compute(
    group: int, failures: int
) -> None:
    rig = Rig(2)
    flaky = Tripwire(rig.ledger, "finish", StoreUnavailable("down"), times=failures)
    rig.add_worker(0, ledger=flaky)
    rig.add_worker(1, ledger=flaky)
    start_others(rig)
    rig.admit("late", (5,))
    tensors = token_ids(5) if group == 0 else hidden()

    rig.publish_step(a_step(rig, "late", group=group, tensors=tensors, deadline_unix_ms=1))
    finish_others(rig)

    (final,) = rig.final_events("late")
    assert (final.finish_reason, final.num_generated) == ("error", 0)
    assert "deadline" in final.error
    assert rig.num_kv_rows("late") == [0, 0]
    assert rig.num_dead() == 0


def test_a_step_whose_rows_never_come_is_left_to_a_redrive_after_the_park_limit() -> None:
    rig = Rig(2, limits=WorkerLimits(park_limit_s=2.0))
    rig.add_workers()
    rig.admit("gap", prompt_of(40))
    started_s = rig.clock()

    rig.publish_step(a_step(rig, "gap", position=30))
    rig.run_until_quiet()

    assert rig.record("gap").finish_reason is None
    assert 2.0 <= rig.clock() - started_s < 2.2
    start_others(rig)
    finish_others(rig)


def test_a_parked_step_does_not_delay_others() -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.admit("gap", prompt_of(40))
    rig.publish_step(a_step(rig, "gap", position=30))
    rig.turn()

    start_others(rig)
    rig.run_until_done("a", "b")

    assert rig.record("gap").finish_reason is None
    assert_answers(rig, OTHERS)


def test_a_token_whose_predecessor_is_not_on_record_is_not_committed() -> None:
    rig = Rig(1)
    rig.add_worker(0)
    rig.admit("gap", prompt_of(10))

    ids = prompt_of(12)  # two positions more than the ledger knows
    rig.publish_step(a_step(rig, "gap", group=0, tensors=token_ids(*ids)))
    rig.run_until_quiet()

    assert rig.tokens("gap") == []
    assert rig.record("gap").finish_reason is None


def test_steps_of_a_request_that_nobody_knows_come_to_an_end() -> None:
    rig = Rig(2)
    rig.add_workers()

    rig.publish_step(a_step(rig, "stranger", group=0, tensors=token_ids(5, 6, 7)))
    rig.run_until_quiet()

    assert rig.ledger.get("stranger") is None
    assert rig.num_ready(DEAD_QUEUE) == 0


def test_steps_of_a_cancelled_request_come_to_an_end_when_its_rows_are_gone() -> None:
    # given a request that was cancelled and cleaned up while its steps still run
    rig = Rig(3)
    rig.add_workers()
    rig.start("gone", prompt_of(40))
    start_others(rig)
    rig.run_until(lambda: len(rig.tokens("gone")) >= 3)
    rig.ledger.finish("gone", FinishReason.ABORT)
    rig.kv_pages.delete("gone", 3, 60)
    waited_s = rig.clock()

    finish_others(rig)

    # then its late steps end, delay nobody and bring no rows back
    assert rig.clock() - waited_s < 1.0
    assert rig.num_kv_rows("gone") == [0, 0, 0]
    assert [final.finish_reason for final in rig.final_events("gone")] == ["abort"]


def test_rows_that_the_store_lost_are_written_again_by_a_worker_that_has_them() -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.start("r", prompt_of(40))
    rig.run_until(lambda: len(rig.tokens("r")) >= 3)

    rig.kv_pages.delete("r", 2, 60)
    rig.run_until_done("r")
    rig.run_until_quiet()

    assert_answers(rig, [("r", prompt_of(40), GREEDY)])
    num_rows = 40 + GREEDY.max_tokens - 1
    assert rig.num_kv_rows("r") == [num_rows, num_rows - 1]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("length", [5, 40])
def test_the_first_rows_of_a_request_that_has_ended_are_not_left_behind(
    known: bool, length: int
) -> None:
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=16))
    step = rig.start("r", prompt_of(length))
    rig.ledger.finish("r", FinishReason.ABORT)
    if not known:
        rig.publish_step(replace(step, request_id="stranger"))

    rig.add_workers()
    rig.run_until_quiet()

    assert [key for key in rig.stores.kv.run(("KEYS", "*")) if b":kv:" in key] == []
