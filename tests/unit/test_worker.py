"""A worker's turn: it computes what the reference computes, whatever the cut and the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.worker.limits import WorkerLimits
from shared.errors import StoreUnavailable
from shared.messages import SamplingParams
from shared.store.kv_pages import PAGE_ROWS
from tests.faults import LosableBroker, Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, expected_tokens, prompt_of


@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize("per_group", [1, 2])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_equal_the_reference(
    num_groups: int, per_group: int, sampling: SamplingParams
) -> None:
    rig = Rig(num_groups)
    rig.add_workers(per_group)

    rig.start("r", prompt_of(20), sampling)
    rig.run_until_done("r")

    assert_answers(rig, [("r", prompt_of(20), sampling)])


@pytest.mark.parametrize("max_batch_rows", [1, 7, 16, 33, 99, 100, 128])
def test_a_long_prompt_is_sliced_and_gives_the_same_tokens(max_batch_rows: int) -> None:
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=max_batch_rows))
    rig.add_workers()

    rig.start("r", prompt_of(100), SAMPLED)
    rig.run_until_done("r")

    assert_answers(rig, [("r", prompt_of(100), SAMPLED)])


def test_groups_may_slice_differently() -> None:
    rig = Rig(3)
    for group, max_batch_rows in enumerate((40, 7, 25)):
        rig.add_worker(group, limits=WorkerLimits(max_batch_rows=max_batch_rows))

    rig.start("r", prompt_of(100))
    rig.run_until_done("r")

    assert_answers(rig, [("r", prompt_of(100), GREEDY)])


def test_one_worker_of_all_groups_gives_the_same_tokens() -> None:
    rig = Rig(4)
    rig.add_worker(0, 1, 2, 3)

    rig.start("r", prompt_of(50), SAMPLED)
    rig.run_until_done("r")

    assert_answers(rig, [("r", prompt_of(50), SAMPLED)])


def test_a_group_that_is_served_later_is_worked_off() -> None:
    rig = Rig(2)
    worker = rig.add_worker(0)
    rig.start("r", prompt_of(10))
    rig.run_until(lambda: rig.num_ready(rig.queue(1)) == 1)

    worker.serve_group(1, rig.layer_group(1))
    rig.run_until_done("r")

    assert worker.groups == (0, 1)
    assert_answers(rig, [("r", prompt_of(10), GREEDY)])


@pytest.mark.parametrize("per_group", [1, 2])
def test_requests_in_one_batch_do_not_see_each_other(per_group: int) -> None:
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=48, max_batch_sequences=5))
    rig.add_workers(per_group)
    asked = [
        (
            f"r{n}",
            prompt_of(1 + 13 * n, salt=n),
            SamplingParams(
                temperature=0.0 if n % 2 else 1.0, seed=n, max_tokens=3 + n, ignore_eos=True
            ),
        )
        for n in range(9)
    ]

    for request_id, prompt, sampling in asked:
        rig.start(request_id, prompt, sampling)
    rig.run_until_done(*(request_id for request_id, _, _ in asked))

    assert_answers(rig, asked)


def test_a_request_ends_at_its_stop_token_and_the_token_counts() -> None:
    prompt = prompt_of(20)
    free = expected_tokens(prompt, SAMPLED)
    stop = next(t for n, t in enumerate(free) if n > 2 and t not in free[:n])
    rig = Rig(2)
    rig.add_workers()
    sampling = replace(SAMPLED, ignore_eos=False)

    rig.start("r", prompt, sampling, stop_token_ids=(stop,))
    rig.run_until_done("r")

    assert rig.tokens("r") == free[: free.index(stop) + 1]
    assert 1 < len(rig.tokens("r")) < len(free)
    assert rig.final_events("r")[0].finish_reason == "stop"


def test_a_request_ends_at_its_last_position() -> None:
    rig = Rig(2)
    rig.add_workers()

    rig.start("r", prompt_of(20), GREEDY)
    rig.run_until_done("r")
    rig.run_until_quiet()

    (final,) = rig.final_events("r")
    assert (final.finish_reason, final.num_generated) == ("length", GREEDY.max_tokens)


def test_decode_steps_of_others_go_between_the_slices_of_a_long_prompt() -> None:
    # given one request that decodes, on a worker that serves both groups
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=4))
    rig.add_worker(0, 1)
    rig.start("short", prompt_of(3))
    rig.run_until(lambda: len(rig.tokens("short")) >= 1)

    # when a prompt of 50 slices comes
    rig.start("long", prompt_of(200))
    rig.run_until_done("short")

    # then it has not held the other up
    assert rig.tokens("long") == []
    rig.run_until_done("long")
    assert_answers(rig, [("short", prompt_of(3), GREEDY), ("long", prompt_of(200), GREEDY)])


def test_all_rows_are_in_the_store_when_a_step_is_settled() -> None:
    rig = Rig(2)
    rig.add_workers()

    rig.start("r", prompt_of(20))
    rig.run_until_done("r")
    rig.run_until_quiet()

    # The last token is drawn and never fed back; nothing needs the row it was drawn from.
    num_rows = 20 + GREEDY.max_tokens - 1
    assert num_rows % PAGE_ROWS, "else that row fills a page, and whoever begins alike needs it"
    assert rig.num_kv_rows("r") == [num_rows, num_rows - 1]


def test_a_page_that_the_last_step_fills_is_in_the_store() -> None:
    rig = Rig(2)
    rig.add_workers()
    num_prompt = 4 * PAGE_ROWS + 1 - GREEDY.max_tokens

    rig.start("r", prompt_of(num_prompt))
    rig.run_until_done("r")
    rig.run_until_quiet()

    assert rig.num_kv_rows("r") == [4 * PAGE_ROWS] * 2


def test_a_cache_that_was_evicted_is_read_from_the_store() -> None:
    rig = Rig(2, limits=WorkerLimits(kv_cache_bytes=0))
    rig.add_workers()

    rig.start("a", prompt_of(20))
    rig.start("b", prompt_of(33, salt=1), SAMPLED)
    rig.run_until_done("a", "b")

    assert_answers(rig, [("a", prompt_of(20), GREEDY), ("b", prompt_of(33, salt=1), SAMPLED)])


def test_a_leaving_worker_hands_back_what_it_holds_and_takes_nothing_more() -> None:
    # given a worker in the middle of a sliced prompt, with more in its inbox
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=8))
    leaving = rig.add_worker(0)
    rig.start("a", prompt_of(40))
    rig.start("b", prompt_of(10, salt=1))
    leaving.turn(0.0)
    assert rig.num_ready(rig.queue(0)) == 0

    leaving.hand_back_all()

    # then both are back in the queue, for others
    assert rig.num_ready(rig.queue(0)) == 2
    rig.kill(leaving)
    rig.add_workers()
    rig.run_until_done("a", "b")
    assert_answers(rig, [("a", prompt_of(40), GREEDY), ("b", prompt_of(10, salt=1), GREEDY)])


@pytest.mark.parametrize("method", ["start_writes", "read"])
def test_a_store_that_fails_for_a_while_only_delays(method: str) -> None:
    rig = Rig(2)
    flaky = Tripwire(rig.kv_pages, method, StoreUnavailable("down"), nth=2, times=3)
    rig.add_worker(0, kv_pages=flaky, limits=WorkerLimits(kv_cache_bytes=0))
    rig.add_worker(1)

    rig.start("r", prompt_of(20), SAMPLED)
    rig.run_until_done("r")

    assert flaky.num_calls > 4
    assert_answers(rig, [("r", prompt_of(20), SAMPLED)])


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_ledger_that_fails_for_a_while_only_delays(after: bool) -> None:
    rig = Rig(2)
    flaky = Tripwire(
        rig.ledger, "start_commits", StoreUnavailable("down"), after=after, nth=2, times=3
    )
    rig.add_worker(0)
    rig.add_worker(1, ledger=flaky)

    rig.start("a", prompt_of(20))
    rig.start("b", prompt_of(9, salt=1), SAMPLED)
    rig.run_until_done("a", "b")

    assert flaky.num_calls > 5
    assert_answers(rig, [("a", prompt_of(20), GREEDY), ("b", prompt_of(9, salt=1), SAMPLED)])


def test_deliveries_of_a_lost_connection_are_dropped_and_their_redelivery_computed() -> None:
    # given a worker with a half done prompt and another request in its inbox
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=8))
    line = LosableBroker(rig.hub)
    worker = rig.add_worker(0, broker=line)
    rig.add_worker(1)
    rig.start("a", prompt_of(40))
    rig.start("b", prompt_of(10, salt=1), SAMPLED)
    worker.turn(0.0)

    line.lose()
    rig.run_until_done("a", "b")
    rig.run_until_quiet()

    assert_answers(rig, [("a", prompt_of(40), GREEDY), ("b", prompt_of(10, salt=1), SAMPLED)])


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_batch_whose_connection_was_lost_before_its_hand_back_is_not_settled_twice(
    nth: int,
) -> None:
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=8))
    line = LosableBroker(rig.hub)

    def lose_and_refuse(*_: object) -> bool:
        if flaky.num_calls == nth - 1:
            line.lose()
        return True

    flaky = Tripwire(
        rig.kv_pages, "start_writes", StoreUnavailable("down"), nth=nth, only_if=lose_and_refuse
    )
    rig.add_worker(0, broker=line, kv_pages=flaky)
    rig.add_worker(1)

    rig.start("a", prompt_of(40))
    rig.start("b", prompt_of(10, salt=1), SAMPLED)
    rig.run_until_done("a", "b")
    rig.run_until_quiet()

    assert_answers(rig, [("a", prompt_of(40), GREEDY), ("b", prompt_of(10, salt=1), SAMPLED)])


class WatchedConfirms:
    """A broker whose confirms note the number of the publish call that was waited for."""

    def __init__(self, inner: Any) -> None:
        self.waited: list[int] = []
        self._inner = inner
        self._num_calls = 0

    def publish(self, messages: Any) -> Any:
        self._num_calls += 1
        return WatchedConfirm(self._inner.publish(messages), self._num_calls, self.waited)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class WatchedConfirm:
    def __init__(self, inner: Any, number: int, waited: list[int]) -> None:
        self._inner, self._number, self._waited = inner, number, waited

    def wait(self, timeout_s: float) -> None:
        self._waited.append(self._number)
        self._inner.wait(timeout_s)


def test_a_slice_is_confirmed_while_the_next_one_is_computed_and_all_before_the_ack() -> None:
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=8))
    broker = WatchedConfirms(rig.new_broker())
    worker = rig.add_worker(0, broker=broker)
    rig.start("a", prompt_of(24))

    seen = []
    for _ in range(3):
        settled = worker.turn(0.0)
        seen.append((settled, list(broker.waited)))

    assert seen == [(0, []), (0, [1]), (1, [1, 2, 3])]
