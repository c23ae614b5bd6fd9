"""The embedded mode, where a worker's own cache is the only place that holds its rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.worker.limits import WorkerLimits
from services.worker.sequences import EMBEDDED_IDLE_S, SequencePool
from shared.errors import KvMissing
from shared.messages import FinishReason
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, prompt_of

OTHERS = [("a", prompt_of(20), GREEDY), ("b", prompt_of(9, salt=1), SAMPLED)]
SLICED = WorkerLimits(max_batch_rows=12, kv_cache_bytes=0)


def finish_others(rig: Rig) -> None:
    rig.run_until_done(*(request_id for request_id, _, _ in OTHERS))
    rig.run_until_quiet()
    assert_answers(rig, OTHERS)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_rows_outlive_any_cache_budget(num_groups: int) -> None:
    rig = Rig(num_groups, limits=SLICED, embedded=True)
    rig.add_workers()

    for request_id, prompt, sampling in OTHERS:
        rig.start(request_id, prompt, sampling)
    finish_others(rig)

    assert rig.num_kv_rows("a") == [0] * num_groups


def test_later_slices_of_a_prompt_that_failed_come_to_an_end() -> None:
    # given a first slice that cannot be computed in group 1, and a second behind it
    rig = Rig(2, limits=SLICED, embedded=True)
    first = rig.add_worker(0)
    rig.start("bad", prompt_of(24))
    rig.run_until(lambda: rig.num_ready(rig.queue(1)) == 2)
    slices = rig.take_all(rig.queue(1))
    rig.close_taps()
    rig.publish_step(replace(slices[0], tensors={"hidden": np.full((12, 64), 1e25, np.float32)}))
    rig.publish_step(slices[1])

    rig.add_worker(1)
    for request_id, prompt, sampling in OTHERS:
        rig.start(request_id, prompt, sampling)
    finish_others(rig)

    assert first.num_steps_done > 1
    assert len(rig.final_events("bad")) == 1
    assert rig.num_dead() == 1


def test_a_cancelled_request_comes_to_an_end() -> None:
    rig = Rig(3, limits=SLICED, embedded=True)
    rig.add_workers()
    rig.start("gone", prompt_of(40))
    for request_id, prompt, sampling in OTHERS:
        rig.start(request_id, prompt, sampling)
    rig.run_until(lambda: len(rig.tokens("gone")) >= 3)

    rig.ledger.finish("gone", FinishReason.ABORT)
    finish_others(rig)

    assert [final.finish_reason for final in rig.final_events("gone")] == ["abort"]


def test_states_that_nothing_was_heard_of_for_long_are_evicted() -> None:
    # The groups before the last do not see a request end.
    rig = Rig(2)
    pool = SequencePool(lambda group: rig.layer_group(group).new_cache(), None, max_bytes=0)
    pool.get(0, "old", now_s=0.0)
    pool.get(0, "young", now_s=1.0)

    pool.trim(now_s=EMBEDDED_IDLE_S)

    assert pool.peek(0, "old") is None
    assert pool.peek(0, "young") is not None


def test_rows_that_are_nowhere_are_missing_rather_than_zeros() -> None:
    rig = Rig(2)
    pool = SequencePool(lambda group: rig.layer_group(group).new_cache(), None, max_bytes=0)

    with pytest.raises(KvMissing, match=r"rows 0\.\.6 of r are gone"):
        pool.top_up(0, "r", 7, now_s=0.0)
