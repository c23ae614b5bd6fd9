"""Requests outlive their scheduler, its connection and its store, and are answered once."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.admission import seed_of
from services.scheduler.limits import SchedulerLimits
from services.scheduler.scheduler import Scheduler
from shared.errors import StoreUnavailable
from shared.messages import Request, SamplingParams, Step
from shared.store import keys
from shared.topology import REQUESTS_QUEUE
from tests.faults import Crash, DeafBroker, LosableBroker, Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, expected_tokens, prompt_of

PROMPT = prompt_of(20)
UNSEEDED = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)


def make_request(request_id: str = "r", **changes: Any) -> Request:
    values: dict[str, Any] = {"token_ids": PROMPT, "sampling": SAMPLED}
    return Request(request_id, **(values | changes))


def run_until_idle(rig: Rig, scheduler: Scheduler) -> None:
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0 and scheduler.num_in_flight == 0)


@pytest.mark.parametrize("num_tokens", [None, 0, 1, 5])
def test_a_scheduler_that_dies_hands_its_requests_to_another(num_tokens: int | None) -> None:
    # given a request that is queued, started or under way
    rig = Rig(2)
    first = rig.add_scheduler(draw_seed=lambda _: 41)
    rig.open_reply_queue("mine")
    rig.submit(make_request(sampling=UNSEEDED), reply_to="mine")
    if num_tokens is not None:
        rig.turn()
        rig.add_workers()
        rig.run_until(lambda: len(rig.tokens("r")) == num_tokens)

    rig.kill(first)
    second = rig.add_scheduler(draw_seed=lambda _: 41 if num_tokens is None else 1_000)
    if num_tokens is None:
        rig.add_workers()
    run_until_idle(rig, second)

    # then it goes on with the seed that was drawn, and is answered once
    seeded = SamplingParams(temperature=0.9, seed=41, max_tokens=12, ignore_eos=True)
    assert_answers(rig, [("r", PROMPT, seeded)])
    (reply,) = rig.replies("mine")
    assert reply.token_ids == tuple(expected_tokens(PROMPT, seeded))
    assert second.num_answered == 1


@pytest.mark.parametrize(
    ("part", "method"),
    [("ledger", "admit"), ("broker", "publish"), ("kv_pages", "delete"), ("broker", "ack")],
)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_scheduler_that_dies_anywhere_leaves_a_request_that_is_answered(
    part: str, method: str, after: bool
) -> None:
    rig = Rig(2)
    rig.add_workers()
    inner = {"ledger": rig.ledger, "broker": rig.new_broker(), "kv_pages": rig.kv_pages}
    wire = Tripwire(inner[part], method, Crash, after=after)
    rig.add_scheduler(draw_seed=lambda _: 41, **{part: wire})
    rig.open_reply_queue("mine")
    rig.submit(make_request(sampling=UNSEEDED), reply_to="mine")
    rig.run_until(lambda: rig.num_crashes == 1)

    second = rig.add_scheduler(draw_seed=lambda _: 41 if (method, after) == ("admit", False) else 0)
    run_until_idle(rig, second)

    seeded = SamplingParams(temperature=0.9, seed=41, max_tokens=12, ignore_eos=True)
    assert_answers(rig, [("r", PROMPT, seeded)])
    replies = rig.replies("mine")
    # The reply comes again only if death struck between it and the ack.
    assert len(replies) == (2 if (method, after) == ("ack", False) else 1)
    assert {reply.token_ids for reply in replies} == {tuple(expected_tokens(PROMPT, seeded))}
    assert rig.num_kv_rows("r") == [0, 0]


def test_a_start_or_a_reply_that_was_not_confirmed_is_sent_again() -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.open_reply_queue("mine")
    deaf = DeafBroker(rig.new_broker(), lost={1, 2, 4, 5})
    scheduler = rig.add_scheduler(broker=deaf)

    rig.submit(make_request(), reply_to="mine")
    run_until_idle(rig, scheduler)

    assert deaf.num_calls == 6  # the start is the third, the reply the sixth
    assert len(rig.replies("mine")) == 1
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_request_that_ended_unanswered_is_answered_by_the_next_scheduler() -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.open_reply_queue("mine")
    first = rig.add_scheduler()
    rig.submit(make_request(), reply_to="mine")
    rig.run_until(lambda: len(rig.tokens("r")) >= 1)
    rig.kill(first)
    rig.run_until_done("r")

    second = rig.add_scheduler()
    run_until_idle(rig, second)

    (reply,) = rig.replies("mine")
    assert reply.token_ids == tuple(expected_tokens(PROMPT, SAMPLED))


@pytest.mark.parametrize("num_messages", [1, 2])
@pytest.mark.parametrize("num_losses", [1, 2])
def test_a_lost_connection_does_not_multiply_replies(num_messages: int, num_losses: int) -> None:
    rig = Rig(2)
    rig.add_workers()
    line = LosableBroker(rig.hub)
    scheduler = rig.add_scheduler(broker=line)
    rig.open_reply_queue("mine")
    for _ in range(num_messages):
        rig.submit(make_request(), reply_to="mine", correlation_id="c")
    rig.run_until(lambda: len(rig.tokens("r")) >= 2)

    for _ in range(num_losses):
        line.lose()
        rig.turn()
        rig.turn()
    run_until_idle(rig, scheduler)

    assert len(rig.replies("mine")) == num_messages
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_two_schedulers_that_admit_one_request_at_once_start_it_with_one_seed() -> None:
    # given a scheduler that does not see the record which another writes at this moment
    rig = Rig(2)
    rig.open_reply_queue("mine")

    class LateSight:
        """The first look comes before the other's record, everything else after it."""

        num_looks = 0

        def get(self, request_id: str) -> Any:
            self.num_looks += 1
            return None if self.num_looks == 1 else rig.ledger.get(request_id)

        def __getattr__(self, name: str) -> Any:
            return getattr(rig.ledger, name)

    first = rig.add_scheduler(draw_seed=lambda _: 41, limits=SchedulerLimits(max_in_flight=1))
    rig.submit(make_request(sampling=UNSEEDED), reply_to="mine")
    first.turn(0.0)
    second = rig.add_scheduler(draw_seed=lambda _: 1_000, ledger=LateSight())
    rig.submit(make_request(sampling=UNSEEDED), reply_to="mine")
    second.turn(0.0)
    assert (first.num_in_flight, second.num_in_flight) == (1, 1)

    steps: list[Step] = rig.take_all(rig.queue(0))
    assert {step.sampling.seed for step in steps} == {41}
    rig.close_taps()
    for step in steps:
        rig.publish_step(step)
    rig.add_workers()
    run_until_idle(rig, first)
    run_until_idle(rig, second)

    assert len(rig.replies("mine")) == 2


def test_a_request_whose_record_was_lost_ends_by_name() -> None:
    rig = Rig(2)
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")
    rig.submit(make_request(), reply_to="mine")
    rig.turn()
    assert rig.num_ready(rig.queue(0)) == 1

    rig.stores.meta.run(("FLUSHALL",))
    rig.add_workers()
    run_until_idle(rig, scheduler)
    rig.run_until_quiet()

    (reply,) = rig.replies("mine")
    (final,) = rig.final_events("r")
    assert "lost the record" in reply.error
    assert final.error == reply.error


def test_a_seed_is_drawn_once_for_a_request_without_one() -> None:
    rig = Rig(2)
    rig.add_workers()
    seeds = iter([41, 42, 43])
    failing = Tripwire(
        rig.new_broker(),
        "publish",
        StoreUnavailable("down"),
        times=2,
        only_if=lambda messages: messages[0].queue == rig.queue(0),
    )
    scheduler = rig.add_scheduler(broker=failing, draw_seed=lambda _: next(seeds))
    sampling = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)

    rig.submit(make_request(sampling=sampling))
    run_until_idle(rig, scheduler)

    assert failing.num_calls == 3
    seeded = SamplingParams(temperature=0.9, seed=41, max_tokens=12, ignore_eos=True)
    assert_answers(rig, [("r", PROMPT, seeded)])
    assert next(seeds) == 42


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_request_of_which_scheduler_and_store_lost_all_draws_the_same_tokens(
    num_tokens: int,
) -> None:
    # given one without a seed, whose next step still runs when nobody knows of it any more
    rig = Rig(2)
    rig.add_workers()
    first = rig.add_scheduler(draw_seed=seed_of)
    rig.submit(make_request(sampling=UNSEEDED))
    rig.run_until(lambda: len(rig.tokens("r")) == num_tokens)
    seen = rig.tokens("r")
    rig.stores.meta.run(("DEL", keys.ledger("r"), keys.events("r")))
    rig.kill(first)

    run_until_idle(rig, rig.add_scheduler(draw_seed=seed_of))

    seeded = SamplingParams(temperature=0.9, seed=seed_of("r"), max_tokens=12, ignore_eos=True)
    assert_answers(rig, [("r", PROMPT, seeded)])
    assert rig.tokens("r")[:num_tokens] == seen


def test_requests_without_a_seed_do_not_share_one() -> None:
    assert len({seed_of(f"r{number}") for number in range(1_000)}) == 1_000
