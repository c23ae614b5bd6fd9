"""A worker ends what it cannot compute by name, and nothing else suffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from services.worker.limits import WorkerLimits
from shared import codec
from shared.errors import KernelError, StoreUnavailable
from shared.messages import FinishReason, Reply, Request, Step
from shared.store import keys
from shared.topology import DEAD_QUEUE
from tests.faults import Tripwire
from tests.rig import GREEDY, SAMPLED, Rig, assert_answers, prompt_of

HIDDEN_SIZE = 64
OTHERS = [("a", prompt_of(20), GREEDY), ("b", prompt_of(9, salt=1), SAMPLED)]


def hidden(value: float = 0.1, rows: int = 1, cols: int = HIDDEN_SIZE) -> dict[str, Any]:
    return {"hidden": np.full((rows, cols), value, np.float32)}


def token_ids(*ids: int) -> dict[str, Any]:
    return {"token_ids": np.array(ids, np.int32)}


def start_others(rig: Rig) -> None:
    for request_id, prompt, sampling in OTHERS:
        rig.start(request_id, prompt, sampling)


def finish_others(rig: Rig) -> None:
    rig.run_until_done(*(request_id for request_id, _, _ in OTHERS))
    rig.run_until_quiet()
    assert_answers(rig, OTHERS)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b"\xff" * 100,
        codec.encode(Request("r", prompt="hello")),
        codec.encode(Reply("r", FinishReason.STOP, "", (), 0)),
    ],
    ids=["empty", "text", "ff", "request", "reply"],
)
@pytest.mark.parametrize("group", [0, 1])
def test_what_is_no_step_is_dead_lettered_and_neighbours_go_on(body: bytes, group: int) -> None:
    rig = Rig(2)
    rig.add_workers()
    start_others(rig)

    rig.publish(rig.queue(group), body)
    finish_others(rig)

    assert rig.num_dead() == 1


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        (0, {"model_id": "other@1"}),
        (1, {"layout_id": "even7"}),
        (1, {"group": 0, "tensors": token_ids(5)}),
        (1, {"group": 7}),
        (0, {"tensors": hidden()}),
        (1, {"tensors": token_ids(5)}),
        (0, {"tensors": token_ids(5, -1)}),
        (0, {"tensors": token_ids(5, 268)}),
        (0, {"tensors": {"token_ids": np.array([5], np.float32)}}),
        (0, {"tensors": {"token_ids": np.array([[5, 6]], np.int32)}}),
        (1, {"tensors": hidden(cols=HIDDEN_SIZE - 1)}),
        (1, {"tensors": {"hidden": np.zeros(HIDDEN_SIZE, np.float32)}}),
        (1, {"tensors": {"hidden": np.zeros((1, HIDDEN_SIZE), np.float16)}}),
        (1, {"tensors": hidden(np.nan)}),
        (1, {"tensors": hidden(np.inf)}),
        (0, {"position": 250, "tensors": token_ids(*range(3, 10))}),
        (1, {"position": 10**12}),
    ],
)
def test_a_step_that_does_not_fit_is_dead_lettered_and_neighbours_go_on(
    group: int, changes: dict[str, Any]
) -> None:
    rig = Rig(2)
    rig.add_workers()
    start_others(rig)
    rig.admit("bad", (5,))
    step = replace(
        a_step(rig, "bad"),
        group=group,
        tensors=token_ids(5) if group == 0 else hidden(),
    )

    rig.publish(rig.queue(group), codec.encode(replace(step, **changes)))
    finish_others(rig)

    assert rig.num_dead() == 1
    assert rig.tokens("bad") == []


def a_step(rig: Rig, request_id: str, **changes: Any) -> Step:
    step = Step(
        request_id=request_id,
        model_id=rig.layout.model_id,
        layout_id=rig.layout.layout_id,
        group=1,
        epoch=0,
        position=0,
        sample=True,
        max_position=20,
        tensors=hidden(),
        sampling=GREEDY,
    )
    return replace(step, **changes)


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

    def logits(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        if any(self._is_bad(row) for row in rows):
            raise KernelError("logits are not finite")
        return self._inner.logits(rows)

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


def test_rows_that_never_come_end_the_request_within_the_park_limit() -> None:
    rig = Rig(2, limits=WorkerLimits(park_limit_s=2.0))
    rig.add_workers()
    rig.admit("gap", prompt_of(40))
    started_s = rig.clock()

    rig.publish_step(a_step(rig, "gap", position=30))
    start_others(rig)
    rig.run_until_done("gap")

    (final,) = rig.final_events("gap")
    assert final.finish_reason == "error"
    assert "holds 0 of the rows of positions 0..29" in final.error
    assert 2.0 <= rig.clock() - started_s < 2.2
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


def test_a_token_whose_predecessor_is_not_on_record_ends_the_request() -> None:
    rig = Rig(1)
    worker = rig.add_worker(0)
    rig.admit("gap", prompt_of(10))

    ids = prompt_of(12)  # two positions more than the ledger knows
    rig.publish_step(a_step(rig, "gap", group=0, tensors=token_ids(*ids)))
    rig.run_until_quiet()

    assert "the last on record is 9" in rig.final_events("gap")[0].error
    assert worker.groups == (0,)


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
    assert rig.num_kv_rows("r") == [40 + GREEDY.max_tokens - 1] * 2
