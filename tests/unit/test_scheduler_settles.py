"""A request is kept in its queue until its end is on the store's disk, and no end is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler.limits import SchedulerLimits
from services.scheduler.scheduler import Scheduler
from shared.messages import Request
from shared.store import keys
from shared.topology import REQUESTS_QUEUE
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, prompt_of

SETTLE_S = 3.0
LIMITS = SchedulerLimits(settle_after_s=SETTLE_S)
PROMPT = prompt_of(5)
REQUEST = Request("r-1", token_ids=PROMPT, sampling=SAMPLED)


@pytest.fixture
def rig() -> Rig:
    rig = Rig(2)
    rig.add_workers()
    rig.open_reply_queue("replies")
    return rig


def answer(rig: Rig, request: Request = REQUEST) -> Scheduler:
    """Start a scheduler and let it answer the request."""
    scheduler = rig.add_scheduler(limits=LIMITS)
    rig.submit(request, reply_to="replies")
    rig.run_until(lambda: rig.num_ready("replies") == 1)
    return scheduler


def lose_tokens(rig: Rig, num_lost: int) -> None:
    """As a store does that comes back without its last second. The end goes with its token: one
    script wrote both.
    """
    record = rig.record("r-1")
    meta = rig.stores.meta
    left = record.committed_position - num_lost
    meta.run(("HSET", keys.ledger("r-1"), "finish_reason", "", "committed", left))
    entries = meta.run(("XRANGE", keys.events("r-1"), "-", "+"))
    meta.run(("DEL", keys.events("r-1")))
    for event_id, fields in entries[: record.num_generated - num_lost]:
        meta.run(("XADD", keys.events("r-1"), event_id, *fields))
    assert rig.final_events("r-1") == []


def lose_everything(rig: Rig) -> None:
    rig.stores.meta.run(("DEL", keys.ledger("r-1"), keys.events("r-1")))


def test_a_message_is_acked_when_its_end_has_settled_and_not_before(rig: Rig) -> None:
    scheduler = answer(rig)
    rig.clock.sleep(SETTLE_S - 1.0)
    rig.turn()

    assert rig.num_messages(REQUESTS_QUEUE) == 1
    assert scheduler.num_in_flight == 0  # nobody waits for anything any more
    rig.clock.sleep(1.0)
    rig.turn()
    assert rig.num_messages(REQUESTS_QUEUE) == 0
    assert scheduler.num_answered == 1
    assert len(rig.replies("replies")) == 1


@pytest.mark.parametrize("num_lost", [1, 3, None])
@pytest.mark.parametrize("dies", [False, True])
def test_an_end_that_the_store_lost_comes_again(rig: Rig, num_lost: int | None, dies: bool) -> None:
    scheduler = answer(rig)
    if dies:
        rig.kill(scheduler)
        rig.add_scheduler(limits=LIMITS)

    lose_everything(rig) if num_lost is None else lose_tokens(rig, num_lost)
    rig.run_until(lambda: bool(rig.ledger.tokens("r-1") and rig.record("r-1").finish_reason))

    assert_answers(rig, [("r-1", PROMPT, SAMPLED)])
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)
    first, *others = rig.replies("replies")
    assert all(other == first for other in others)


def test_a_request_without_a_seed_gets_the_same_one_when_its_record_was_lost() -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.add_scheduler(limits=LIMITS)
    request = replace(REQUEST, sampling=replace(SAMPLED, seed=None))

    tokens = []
    for _ in range(2):
        rig.submit(request)
        rig.run_until(lambda: rig.ledger.get("r-1") is not None)
        rig.run_until_done("r-1")
        tokens.append(rig.tokens("r-1"))
        rig.clock.sleep(SETTLE_S)
        rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)
        lose_everything(rig)

    assert tokens[0] == tokens[1]


def test_a_copy_that_comes_while_the_first_settles_is_answered_too(rig: Rig) -> None:
    answer(rig)

    rig.submit(REQUEST, reply_to="replies", correlation_id="again")
    rig.run_until(lambda: rig.num_ready("replies") == 2)

    rig.clock.sleep(SETTLE_S)
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)


def test_a_scheduler_that_leaves_has_nothing_answered_twice(rig: Rig) -> None:
    scheduler = answer(rig)

    scheduler.leave()
    rig.kill(scheduler)
    rig.add_scheduler(limits=LIMITS)
    rig.turn()

    assert rig.num_messages(REQUESTS_QUEUE) == 0
    assert len(rig.replies("replies")) == 1


def test_what_settles_keeps_no_other_from_running_and_one_runs_at_once(rig: Rig) -> None:
    rig.add_scheduler(limits=replace(LIMITS, max_in_flight=1))
    for number in range(3):
        rig.submit(Request(f"r-{number}", token_ids=PROMPT, sampling=GREEDY))

    running = set()
    while not (rig.ledger.get("r-1") and rig.record("r-1").finish_reason):
        rig.turn()
        moving = [
            f"r-{n}"
            for n in range(3)
            if (record := rig.ledger.get(f"r-{n}"))
            and record.num_generated
            and not record.finish_reason
        ]
        running |= set(moving)
        assert len(moving) <= 1

    assert running == {"r-0", "r-1"}
    assert rig.num_messages(REQUESTS_QUEUE) == 3
    rig.clock.sleep(SETTLE_S)
    rig.run_until(lambda: bool(rig.ledger.get("r-2") and rig.record("r-2").finish_reason))
