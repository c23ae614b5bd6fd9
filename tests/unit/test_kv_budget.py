"""What does not fit into the KV budget waits in order, or is refused with both numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.limits import SchedulerLimits
from services.scheduler.scheduler import Scheduler
from shared.kv_budget import KvBudget
from shared.messages import FinishReason, Request
from shared.topology import REQUESTS_QUEUE
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

PROMPT = prompt_of(20)
NUM_POSITIONS = 20 + 12 - 1  # the last token of an answer is never fed back


def bytes_of(rig: Rig, num_requests: float) -> int:
    per_position = rig.config.num_hidden_layers * rig.config.kv_row_bytes_per_layer
    return round(num_requests * NUM_POSITIONS * per_position)


def limits_for(rig: Rig, num_requests: float) -> SchedulerLimits:
    return SchedulerLimits(kv_budget_bytes=bytes_of(rig, num_requests))


def submit(rig: Rig, request_id: str, *, max_tokens: int = 12, deadline_unix_ms: int = 0) -> None:
    sampling = replace(SAMPLED, max_tokens=max_tokens)
    rig.submit(
        Request(request_id, token_ids=PROMPT, sampling=sampling, deadline_unix_ms=deadline_unix_ms),
        reply_to="mine",
    )


def run_until_idle(rig: Rig, scheduler: Scheduler) -> None:
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0 and scheduler.num_in_flight == 0)


def turns(rig: Rig, number: int) -> None:
    for _ in range(number):
        rig.turn()


def test_what_is_reserved_comes_back() -> None:
    budget = KvBudget(100)
    budget.reserve("a", 60)

    assert budget.fits(40)
    assert not budget.fits(41)
    budget.reserve("b", 80)  # adopted: it runs already
    assert budget.reserved_bytes == 140
    budget.release("a")
    budget.release("a")
    assert budget.fits(20)
    assert KvBudget(None).fits(1 << 60)


def test_no_more_runs_at_once_than_the_budget_holds() -> None:
    rig = Rig(2, prefix_bytes=None)  # what they share is in another budget
    rig.add_workers()
    scheduler = rig.add_scheduler(limits=limits_for(rig, 2.5))
    rig.open_reply_queue("mine")
    names = [f"r{n}" for n in range(7)]

    for name in names:
        submit(rig, name)
    most = 0
    while scheduler.num_answered < len(names):
        rig.turn()
        most = max(most, sum(any(rig.num_kv_rows(name)) for name in names))
        assert scheduler.reserved_kv_bytes <= bytes_of(rig, 2.5)

    assert most == 2
    assert [reply.request_id for reply in rig.replies("mine")] == names
    assert_answers(rig, [(name, PROMPT, SAMPLED) for name in names])
    assert scheduler.reserved_kv_bytes == 0


def test_a_big_request_is_not_starved_by_small_ones() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler(limits=limits_for(rig, 2.0))
    rig.open_reply_queue("mine")

    submit(rig, "first")
    submit(rig, "big", max_tokens=12 + 31)  # the whole budget
    for number in range(4):
        submit(rig, f"small{number}", max_tokens=2)
    run_until_idle(rig, scheduler)

    order = [reply.request_id for reply in rig.replies("mine")]
    assert order[:2] == ["first", "big"]


def test_kv_full_serves_or_refuses_by_deadline() -> None:
    # given a budget that is taken for as long as nobody computes
    rig = Rig(2)
    scheduler = rig.add_scheduler(limits=limits_for(rig, 1.0))
    rig.open_reply_queue("mine")
    submit(rig, "runs")
    submit(rig, "overdue", deadline_unix_ms=1)
    submit(rig, "patient")
    turns(rig, 20)

    # then one whose time is over hears so, and does not hold up the next
    (reply,) = rig.replies("mine")
    assert reply.request_id == "overdue"
    assert "deadline" in reply.error
    assert rig.num_ready(rig.queue(0)) == 1
    assert (scheduler.num_in_flight, scheduler.num_waiting) == (2, 1)
    rig.add_workers()
    run_until_idle(rig, scheduler)
    assert_answers(rig, [("runs", PROMPT, SAMPLED), ("patient", PROMPT, SAMPLED)])


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler(limits=limits_for(rig, 0.99))
    rig.open_reply_queue("mine")

    submit(rig, "r")
    submit(rig, "short", max_tokens=5)
    run_until_idle(rig, scheduler)

    refused, served = rig.replies("mine")
    assert f"{bytes_of(rig, 1)} bytes" in refused.error
    assert f"{bytes_of(rig, 0.99)} bytes" in refused.error
    assert "--kv-budget" in refused.error
    assert served.error == ""


def test_what_a_larger_budget_admitted_and_never_started_holds_nobody_up() -> None:
    rig = Rig(2)
    first = rig.add_scheduler(limits=limits_for(rig, 2.0))
    rig.open_reply_queue("mine")
    submit(rig, "runs")
    submit(rig, "big", max_tokens=12 + 31)  # the whole of the first one's budget
    submit(rig, "small")
    turns(rig, 10)

    rig.kill(first)
    second = rig.add_scheduler(limits=limits_for(rig, 1.0))
    rig.add_workers()
    run_until_idle(rig, second)

    by_id = {reply.request_id: reply for reply in rig.replies("mine")}
    assert "--kv-budget" in by_id["big"].error
    assert_answers(rig, [("runs", PROMPT, SAMPLED), ("small", PROMPT, SAMPLED)])


def test_who_comes_after_five_hundred_requests_of_another_is_next_after_them() -> None:
    # given a budget for three at once, so that most wait
    rig = Rig(1)
    rig.add_workers()
    scheduler = rig.add_scheduler(limits=limits_for(rig, 3.0))
    rig.open_reply_queue("mine")
    dump = [f"dump{n}" for n in range(500)]
    for name in dump:
        submit(rig, name, max_tokens=1)
    submit(rig, "late", max_tokens=1)
    for number in range(20):
        submit(rig, f"later{number}", max_tokens=1)

    run_until_idle(rig, scheduler)

    order = [reply.request_id for reply in rig.replies("mine")]
    assert order[:501] == [*dump, "late"]


def test_a_waiting_request_can_be_cancelled() -> None:
    rig = Rig(2)
    scheduler = rig.add_scheduler(limits=limits_for(rig, 1.0))
    rig.open_reply_queue("mine")
    submit(rig, "runs")
    submit(rig, "waits")
    turns(rig, 10)

    rig.ledger.finish("waits", FinishReason.ABORT)
    turns(rig, 10)

    assert [reply.finish_reason for reply in rig.replies("mine")] == ["abort"]
    assert scheduler.num_waiting == 0
    assert rig.num_ready(rig.queue(0)) == 1


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_what_waited_and_what_ran_at_a_dead_scheduler_does_so_at_the_next(num_tokens: int) -> None:
    rig = Rig(2)
    first = rig.add_scheduler(limits=limits_for(rig, 1.0))
    rig.open_reply_queue("mine")
    submit(rig, "runs")
    submit(rig, "waits")
    turns(rig, 10)
    if num_tokens:
        rig.add_workers()
        rig.run_until(lambda: len(rig.tokens("runs")) == num_tokens)

    rig.kill(first)
    second = rig.add_scheduler(limits=limits_for(rig, 1.0))
    turns(rig, 3)
    assert second.reserved_kv_bytes == bytes_of(rig, 1.0)
    assert second.num_waiting == 1
    if not num_tokens:
        rig.add_workers()
    run_until_idle(rig, second)

    assert [reply.request_id for reply in rig.replies("mine")] == ["runs", "waits"]
    assert_answers(rig, [("runs", PROMPT, SAMPLED), ("waits", PROMPT, SAMPLED)])
