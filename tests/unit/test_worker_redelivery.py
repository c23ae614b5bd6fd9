"""Steps that come twice, late, too early or to another worker: the tokens stay the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.worker.limits import WorkerLimits
from shared import codec
from shared.errors import StoreUnavailable
from shared.messages import Step
from tests.faults import CALLS, Crash, DeafBroker, LosableBroker, Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, expected_tokens, prompt_of

PROMPT = prompt_of(30)
SLICED = WorkerLimits(max_batch_rows=12)
ASKED = [("a", PROMPT, SAMPLED), ("b", prompt_of(17, salt=1), GREEDY)]

FAILING_CALLS = [call for call in CALLS if call[2] != "ack"]  # an ack has no answer


def add_failing_worker(
    rig: Rig, group: int, part: str, method: str, error: type[BaseException], **when: Any
) -> Tripwire:
    """A worker one of whose parts fails."""
    inner = {"kv_pages": rig.kv_pages, "ledger": rig.ledger, "broker": LosableBroker(rig.hub)}
    wire = Tripwire(inner[part], method, error, **when)
    rig.add_worker(group, **{part: wire})
    return wire


def start_asked(rig: Rig) -> None:
    for request_id, prompt, sampling in ASKED:
        rig.start(request_id, prompt, sampling)


def finish_asked(rig: Rig) -> None:
    rig.run_until_done(*(request_id for request_id, _, _ in ASKED))
    rig.run_until_quiet()
    assert_answers(rig, ASKED)
    assert rig.num_dead() == 0


def feed(rig: Rig, request_id: str, token: int, position: int) -> Step:
    """The decode step of a token."""
    return Step(
        request_id=request_id,
        model_id=rig.layout.model_id,
        layout_id=rig.layout.layout_id,
        group=0,
        epoch=0,
        position=position,
        sample=True,
        max_position=len(PROMPT) + SAMPLED.max_tokens - 1,
        tensors={"token_ids": np.array([token], np.int32)},
        sampling=SAMPLED,
        stop_token_ids=rig.config.eos_token_ids,
    )


@pytest.mark.parametrize("nth", [1, 2, 6])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("group", "part", "method"), CALLS)
def test_a_worker_that_dies_anywhere_in_its_turn_changes_no_token(
    group: int, part: str, method: str, after: bool, nth: int
) -> None:
    rig = Rig(2, limits=SLICED)
    add_failing_worker(rig, group, part, method, Crash, after=after, nth=nth)
    rig.add_workers()

    start_asked(rig)
    finish_asked(rig)

    assert rig.num_crashes == 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("group", "part", "method"), FAILING_CALLS)
def test_a_call_that_fails_in_any_place_only_delays(
    group: int, part: str, method: str, after: bool
) -> None:
    rig = Rig(2, limits=SLICED)
    wire = add_failing_worker(
        rig, group, part, method, StoreUnavailable("gone for a moment"), after=after, nth=2, times=3
    )
    rig.add_worker(1 - group)

    start_asked(rig)
    finish_asked(rig)

    assert wire.num_calls > 4


@pytest.mark.parametrize("group", [0, 1])
def test_what_was_not_confirmed_is_sent_again(group: int) -> None:
    rig = Rig(2, limits=SLICED)
    deaf = DeafBroker(rig.new_broker(), lost={1, 3, 4, 9})
    rig.add_worker(group, broker=deaf)
    rig.add_worker(1 - group)

    start_asked(rig)
    finish_asked(rig)

    assert deaf.num_calls > 9


def test_a_batch_that_fails_here_goes_to_a_worker_that_can() -> None:
    # given a worker that can never write its rows
    rig = Rig(2)
    down = StoreUnavailable("down")
    wire = add_failing_worker(rig, 0, "kv_pages", "start_writes", down, times=None)
    rig.add_worker(1)
    start_asked(rig)
    rig.run_until(lambda: wire.num_calls == 3)

    rig.add_worker(0)
    finish_asked(rig)


def test_a_repeat_of_a_confirmed_step_is_acked_without_output() -> None:
    rig = Rig(2)
    published = Tripwire(rig.new_broker(), "publish", Crash, times=0)
    worker = rig.add_worker(0, broker=published)
    step = rig.start("r", PROMPT, SAMPLED)
    worker.turn(0.0)
    assert published.num_calls == 1

    rig.publish_step(step)
    worker.turn(0.0)

    assert published.num_calls == 1
    assert rig.num_messages(rig.queue(0)) == 0
    assert rig.num_ready(rig.queue(1)) == 1


def test_a_repeat_that_waited_beside_its_twin_is_acked_without_output() -> None:
    rig = Rig(2)
    published = Tripwire(rig.new_broker(), "publish", Crash, times=0)
    worker = rig.add_worker(0, broker=published)
    step = rig.start("r", PROMPT, SAMPLED)
    rig.publish_step(step)
    rig.publish_step(step)

    for _ in range(3):
        worker.turn(0.0)

    assert published.num_calls == 1
    assert rig.num_messages(rig.queue(0)) == 0


def test_a_repeat_in_a_later_epoch_is_computed_again() -> None:
    rig = Rig(2)
    worker = rig.add_worker(0)
    step = rig.start("r", PROMPT, SAMPLED)
    worker.turn(0.0)

    rig.publish_step(replace(step, epoch=1))
    worker.turn(0.0)

    assert rig.num_ready(rig.queue(1)) == 2


@pytest.mark.parametrize("per_group", [1, 2, 3])
@pytest.mark.parametrize("num_copies", [2, 5])
@pytest.mark.parametrize("kv_cache_bytes", [0, 32 << 20], ids=["forgetful", "remembering"])
def test_copies_of_a_step_never_multiply_and_every_token_comes_once(
    per_group: int, num_copies: int, kv_cache_bytes: int
) -> None:
    rig = Rig(2, limits=WorkerLimits(kv_cache_bytes=kv_cache_bytes))
    rig.add_workers(per_group)
    step = rig.start("r", PROMPT, SAMPLED)
    for _ in range(num_copies - 1):
        rig.publish_step(step)

    most = 0

    def is_done() -> bool:
        nonlocal most
        most = max(most, rig.num_steps())
        return rig.num_steps() == 0

    rig.run_until(is_done)

    assert most == num_copies
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


@pytest.mark.parametrize("kv_cache_bytes", [0, 32 << 20], ids=["forgetful", "remembering"])
def test_a_late_copy_dies_out_while_the_request_goes_on(kv_cache_bytes: int) -> None:
    # given a request that is some tokens ahead of an old step
    rig = Rig(2, limits=WorkerLimits(kv_cache_bytes=kv_cache_bytes))
    rig.add_workers()
    rig.start("r", PROMPT, SAMPLED)
    rig.run_until(lambda: len(rig.tokens("r")) == 5)
    old = feed(rig, "r", rig.tokens("r")[1], len(PROMPT) + 1)

    rig.publish_step(old)
    for _ in range(6):
        rig.turn()

    # then one step is under way again, and the tokens are right
    assert rig.num_steps() == 1
    rig.run_until_done("r")
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


@pytest.mark.parametrize("kv_cache_bytes", [0, 32 << 20], ids=["forgetful", "remembering"])
def test_late_copies_after_the_end_die_out(kv_cache_bytes: int) -> None:
    rig = Rig(2, limits=WorkerLimits(kv_cache_bytes=kv_cache_bytes))
    rig.add_workers(2)
    step = rig.start("r", PROMPT, SAMPLED)
    rig.run_until_done("r")
    rig.run_until_quiet()
    rig.kv_pages.delete("r", 2, 100)
    tokens = rig.tokens("r")

    rig.publish_step(step)
    rig.publish_step(feed(rig, "r", tokens[3], len(PROMPT) + 3))
    rig.run_until_quiet()

    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_two_workers_that_no_presence_tells_of_take_turns_in_one_request() -> None:
    rig = Rig(2)
    workers = rig.add_workers(2)
    rig.peers.clear()

    rig.start("r", PROMPT, SAMPLED)
    rig.run_until_done("r")

    assert all(worker.num_steps_done >= 3 for worker in workers)
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_slice_that_overtakes_its_predecessor_is_parked_and_then_computed() -> None:
    # given the three slices of a prompt for group 1, in the hands of two workers
    rig = Rig(2, limits=SLICED)
    rig.add_worker(0)
    rig.start("r", PROMPT, SAMPLED)
    rig.run_until(lambda: rig.num_ready(rig.queue(1)) == 3)
    early, late = rig.add_worker(1, limits=WorkerLimits(prefetch=1)), rig.add_worker(1)

    # when the second is taken first
    settled = [late.turn(0.0) for _ in range(3)]
    assert settled == [0, 0, 0]
    assert rig.tokens("r") == []
    early.turn(0.0)
    rig.run_until_done("r")

    assert_answers(rig, [("r", PROMPT, SAMPLED)])


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (2, 0, 1), (1, 0, 2)])
def test_slices_in_any_order_give_the_same_tokens(order: Sequence[int]) -> None:
    rig = Rig(2, limits=SLICED)
    first = rig.add_worker(0)
    rig.start("r", PROMPT, SAMPLED)
    rig.run_until(lambda: rig.num_ready(rig.queue(1)) == 3)
    slices = rig.take_all(rig.queue(1))
    rig.close_taps()
    rig.add_worker(1)

    for index in order:
        rig.publish(rig.queue(1), codec.encode(slices[index]))
        rig.turn()
    rig.run_until_done("r")

    assert first.num_steps_done > 1
    assert rig.tokens("r") == expected_tokens(PROMPT, SAMPLED)
