"""Requests of batches are served, but only when nobody else waits, and never fill all the room."""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.limits import SchedulerLimits
from shared import codec
from shared.kv_budget import KvBudget
from shared.messages import FinishReason, Request
from shared.topology import BATCH_QUEUE, REQUESTS_QUEUE, control_queues
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

PROMPT = prompt_of(20)


def send(rig: Rig, queue: str, *request_ids: str, max_tokens: int = 12) -> None:
    sampling = replace(SAMPLED, max_tokens=max_tokens)
    for request_id in request_ids:
        request = Request(request_id, token_ids=PROMPT, sampling=sampling)
        rig.publish(queue, codec.encode(request), reply_to="mine")


def rig_of(max_in_flight: int, num_workers: int = 1) -> Rig:
    rig = Rig(1, prefix_bytes=None)
    for _ in range(num_workers):
        rig.add_worker(0)
    rig.open_reply_queue("mine")
    rig.add_scheduler(limits=SchedulerLimits(max_in_flight=max_in_flight))
    return rig


def answered(rig: Rig) -> list[str]:
    return [reply.request_id for reply in rig.replies("mine")]


def test_requests_of_a_batch_are_answered_alone() -> None:
    rig = rig_of(4)
    batch = [f"b{n}" for n in range(9)]

    send(rig, BATCH_QUEUE, *batch)
    rig.run_until(lambda: rig.num_messages(BATCH_QUEUE) == 0)

    assert sorted(answered(rig)) == batch
    assert_answers(rig, [(name, PROMPT, SAMPLED) for name in batch])


def test_whoever_waits_for_an_answer_is_served_before_a_batch_that_came_first() -> None:
    rig = rig_of(1)
    batch = [f"b{n}" for n in range(4)]
    asked = [f"r{n}" for n in range(4)]

    send(rig, BATCH_QUEUE, *batch)
    rig.run_until(lambda: rig.ledger.get("b0") is not None)
    send(rig, REQUESTS_QUEUE, *asked)
    rig.run_until(lambda: rig.num_messages(BATCH_QUEUE) == 0)

    order = answered(rig)
    # One of the batch ran already, and one may have been let in before the others were seen.
    assert max(order.index(name) for name in asked) <= len(asked) + 1
    assert order[-2:] == batch[-2:]


def test_a_batch_leaves_half_of_the_room_to_others() -> None:
    rig = rig_of(4, num_workers=0)
    batch = [f"b{n}" for n in range(8)]

    send(rig, BATCH_QUEUE, *batch)
    for _ in range(20):
        rig.turn()
    admitted = [name for name in batch if rig.ledger.get(name) is not None]
    started_of_batch = rig.num_steps()
    send(rig, REQUESTS_QUEUE, "r0", "r1")
    for _ in range(20):
        rig.turn()

    assert admitted, "nothing was taken from the queue of batches"
    assert started_of_batch == 2
    assert rig.num_steps() == 4, "a request that somebody waits for found no room"


def test_beside_a_request_that_somebody_waits_for_one_of_a_batch_runs() -> None:
    rig = rig_of(8, num_workers=0)
    batch = [f"b{n}" for n in range(8)]

    send(rig, REQUESTS_QUEUE, "r0")
    for _ in range(5):
        rig.turn()
    send(rig, BATCH_QUEUE, *batch)
    for _ in range(20):
        rig.turn()
    num_beside = rig.num_steps()
    rig.ledger.finish("r0", FinishReason.ABORT)
    for _ in range(20):
        rig.turn()

    assert num_beside == 2
    assert rig.num_steps() == 1 + 4, "half of the room, once it is alone"


def test_no_more_of_a_batch_run_than_the_limit_says() -> None:
    budget = KvBudget(None, 256, 3)
    for name in ("b0", "b1"):
        budget.reserve(name, 1, is_batch=True)
    assert budget.fits(1, is_batch=True)

    budget.reserve("b2", 1, is_batch=True)

    assert not budget.fits(1, is_batch=True)
    assert budget.fits(1)


def test_a_single_request_of_a_batch_may_have_more_than_half_of_the_budget() -> None:
    budget = KvBudget(100)

    assert budget.fits(80, is_batch=True)
    budget.reserve("b0", 80, is_batch=True)
    assert not budget.fits(10, is_batch=True)
    assert budget.fits(20)
    budget.release("b0")
    budget.reserve("b1", 30, is_batch=True)
    assert budget.fits(20, is_batch=True)
    assert not budget.fits(21, is_batch=True)
    budget.reserve("r0", 50)
    budget.release("b1")
    assert budget.fits(50, is_batch=True), "what others have is not the batch's"


def test_a_killed_scheduler_leaves_its_batch_to_the_next() -> None:
    rig = rig_of(4)
    batch = [f"b{n}" for n in range(6)]
    send(rig, BATCH_QUEUE, *batch)
    rig.run_until(lambda: bool(rig.tokens("b0")))

    rig.kill(rig.actors[-1])
    rig.add_scheduler(limits=SchedulerLimits(max_in_flight=4))
    rig.run_until(lambda: rig.num_messages(BATCH_QUEUE) == 0)

    assert_answers(rig, [(name, PROMPT, SAMPLED) for name in batch])


def test_the_queue_of_batches_is_never_declared_last() -> None:
    names = [spec.name for spec in control_queues()]

    assert names[:2] == [REQUESTS_QUEUE, BATCH_QUEUE]
    assert len(names) > 2


def test_steps_say_that_nobody_waits_for_them_at_every_group_and_after_a_redrive() -> None:
    rig = Rig(2, prefix_bytes=None)
    rig.add_worker(0)
    scheduler = rig.add_scheduler()
    send(rig, BATCH_QUEUE, "batch")
    send(rig, REQUESTS_QUEUE, "asked")
    at_group_1 = rig.queue(1)
    rig.run_until(lambda: rig.num_messages(at_group_1) == 2)
    first = rig.take_all(at_group_1)  # they are lost
    rig.run_until(lambda: scheduler.num_redrives >= 2 and rig.num_messages(at_group_1) >= 2)
    again = rig.take_all(at_group_1)

    for steps in (first, again):
        assert {step.request_id: step.is_batch for step in steps} == {"batch": True, "asked": False}
    assert all(step.epoch > 0 for step in again)


def test_a_batch_goes_on_beside_requests_that_never_pause() -> None:
    rig = rig_of(8)
    send(rig, BATCH_QUEUE, "batch")
    rig.run_until(lambda: bool(rig.tokens("batch")))

    for number in range(6):
        send(rig, REQUESTS_QUEUE, f"asked-{number}", max_tokens=200)
    rig.run_until(lambda: bool(rig.final_events("batch")))

    assert_answers(rig, [("batch", PROMPT, SAMPLED)])
    assert not any(rig.final_events(f"asked-{number}") for number in range(6))
