"""How requests end that cannot run or no longer run: refused, overdue, uncovered, handed over."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.scheduler.scheduler import Scheduler, SchedulerLimits
from shared import codec
from shared.messages import FinishReason, Reply, Request, SamplingParams, Step
from shared.store import keys
from shared.topology import REQUESTS_QUEUE
from tests.faults import Crash, DeafBroker, LosableBroker, Tripwire
from tests.rig import SAMPLED, Rig, assert_answers, expected_tokens, prompt_of

PROMPT = prompt_of(20)
GRACE = SchedulerLimits(uncovered_grace_s=10.0, coverage_check_s=1.0)
UNSEEDED = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True)


def make_request(request_id: str = "r", **changes: Any) -> Request:
    values: dict[str, Any] = {"token_ids": PROMPT, "sampling": SAMPLED}
    return Request(request_id, **(values | changes))


def run_until_idle(rig: Rig, scheduler: Scheduler) -> None:
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0 and scheduler.num_in_flight == 0)


def run_for(rig: Rig, seconds: float) -> None:
    end_s = rig.clock() + seconds
    while rig.clock() < end_s:
        rig.turn()


# refused


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"garbage", codec.MSGPACK),
        (b"", codec.MSGPACK),
        (b"{", codec.JSON),
        (json.dumps({"request_id": "r", "prompt": "hi", "max_tokens": 1}).encode(), "text/plain"),
        (json.dumps({"request_id": "r"}).encode(), codec.JSON),
        (json.dumps({"request_id": "r", "token_ids": [5, -1]}).encode(), codec.JSON),
        (codec.encode(Reply("r", FinishReason.STOP, "", (), 0)), codec.MSGPACK),
    ],
    ids=["garbage", "empty", "broken json", "other type", "no prompt", "bad token", "a reply"],
)
@pytest.mark.parametrize("reply_to", ["", "mine", "nowhere"])
def test_an_unreadable_request_is_dead_lettered_and_answered_if_it_can_be(
    body: bytes, content_type: str, reply_to: str
) -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")

    rig.publish(
        REQUESTS_QUEUE, body, content_type=content_type, reply_to=reply_to, correlation_id="c"
    )
    rig.submit(make_request("next"))
    run_until_idle(rig, scheduler)

    assert rig.num_dead() == 1
    replies = rig.replies("mine")
    assert [reply.finish_reason for reply in replies] == (["error"] if reply_to == "mine" else [])
    assert all(reply.error for reply in replies)
    assert_answers(rig, [("next", PROMPT, SAMPLED)])


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": 7},
        {"prompt": "hi", "sampling": {"temperature": 500}},
        {"prompt": "hi", "deadline_unix_ms": 2**60},
        {"token_ids": [-1]},
        {},
    ],
)
def test_an_unreadable_request_that_names_itself_has_a_final_event(fields: dict[str, Any]) -> None:
    rig = Rig(2)
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")
    body = json.dumps({"request_id": "r", **fields}).encode()

    rig.publish(REQUESTS_QUEUE, body, content_type=codec.JSON, reply_to="mine")
    run_until_idle(rig, scheduler)

    (reply,) = rig.replies("mine")
    (final,) = rig.final_events("r")
    assert (reply.request_id, reply.error) == ("r", final.error)
    assert rig.num_dead() == 1


def test_an_unreadable_copy_does_not_end_a_request_that_runs() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.submit(make_request("r"))
    rig.run_until(lambda: len(rig.tokens("r")) >= 2)

    rig.publish(REQUESTS_QUEUE, b'{"request_id": "r"}', content_type=codec.JSON)
    run_until_idle(rig, scheduler)

    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_prompt_that_cannot_fit_is_refused_without_tokenising_it() -> None:
    rig = Rig(1)
    scheduler = rig.add_scheduler()
    prompt = "a" * (12 * 256)  # no token of the tiny vocabulary has more than 13 bytes

    rig.submit(make_request(token_ids=None, prompt=prompt[:500]))
    rig.submit(make_request("s", token_ids=None, prompt=prompt * 2))
    run_until_idle(rig, scheduler)

    (counted,), (estimated,) = rig.final_events("r"), rig.final_events("s")
    assert "has 500 tokens" in counted.error
    assert "at least" in estimated.error


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token_ids": prompt_of(256)}, "256 tokens"),
        ({"token_ids": (5, 268)}, "268"),
        ({"model": "other"}, "other"),
        ({"token_ids": None, "prompt": ""}, "no tokens"),
    ],
)
def test_a_request_that_cannot_be_served_has_a_final_event_and_a_reply(
    changes: dict[str, Any], reason: str
) -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")

    rig.submit(make_request("bad", **changes), reply_to="mine")
    rig.submit(make_request("bad", **changes), reply_to="mine")
    rig.submit(make_request("next"))
    run_until_idle(rig, scheduler)

    (final,) = rig.final_events("bad")
    first, second = rig.replies("mine")
    assert (final.finish_reason, final.num_generated) == ("error", 0)
    assert reason in final.error
    assert first == second
    assert first.error == final.error
    assert_answers(rig, [("next", PROMPT, SAMPLED)])


def test_a_record_that_another_version_wrote_stops_nobody_else() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")
    rig.stores.meta.run(("HSET", keys.ledger("old"), "epoch", "x"))

    rig.submit(make_request("old"), reply_to="mine")
    rig.submit(make_request("next"))
    run_until_idle(rig, scheduler)

    assert [(r.request_id, r.finish_reason) for r in rig.replies("mine")] == [("old", "error")]
    assert_answers(rig, [("next", PROMPT, SAMPLED)])


# overdue


@pytest.mark.parametrize("workers", [False, True])
def test_a_request_whose_deadline_has_passed_ends_by_name(workers: bool) -> None:
    rig = Rig(2)
    if workers:
        rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")

    rig.submit(make_request(deadline_unix_ms=1), reply_to="mine")
    rig.submit(make_request("long", deadline_unix_ms=2**52))
    rig.run_until(lambda: scheduler.num_answered >= 1)
    if not workers:
        rig.add_workers()
    run_until_idle(rig, scheduler)
    rig.run_until_quiet()

    (final,) = rig.final_events("r")
    (reply,) = rig.replies("mine")
    assert "deadline" in final.error
    assert (reply.finish_reason, reply.error) == ("error", final.error)
    assert_answers(rig, [("long", PROMPT, SAMPLED)])


# uncovered


def test_a_group_without_workers_ends_requests_after_the_grace() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    rig.coverage = [1, 0]
    scheduler = rig.add_scheduler(limits=GRACE)
    rig.open_reply_queue("mine")
    rig.submit(make_request(), reply_to="mine")
    started_s = rig.clock()

    rig.run_until(lambda: bool(rig.ledger.get("r") and rig.record("r").finish_reason))

    assert 10.0 <= rig.clock() - started_s < 11.5
    run_until_idle(rig, scheduler)
    (reply,) = rig.replies("mine")
    assert "layer group 1 of 2 has no live worker" in reply.error
    assert "cellpipe worker --group 1" in reply.error


def test_coverage_that_comes_back_in_time_ends_nothing() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    rig.coverage = [1, 0]
    scheduler = rig.add_scheduler(limits=GRACE)
    rig.submit(make_request())
    run_for(rig, 8.0)

    rig.coverage = [1, 1]
    run_for(rig, 8.0)
    rig.coverage = [1, 0]  # away once more, as briefly
    run_for(rig, 8.0)
    rig.coverage = [1, 1]
    rig.add_worker(1)
    run_until_idle(rig, scheduler)

    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_new_request_has_its_own_grace() -> None:
    rig = Rig(2)
    rig.coverage = [0, 1]
    rig.add_scheduler(limits=GRACE)
    rig.submit(make_request("first"))
    run_for(rig, 9.0)

    rig.submit(make_request("second"))
    run_for(rig, 4.0)

    assert rig.record("first").finish_reason == "error"
    assert rig.record("second").finish_reason is None


# handed over


@pytest.mark.parametrize("num_tokens", [None, 0, 1, 5])
def test_a_scheduler_that_dies_hands_its_requests_to_another(num_tokens: int | None) -> None:
    # given a request that is queued, started or under way
    rig = Rig(2)
    first = rig.add_scheduler(draw_seed=lambda: 41)
    rig.open_reply_queue("mine")
    rig.submit(make_request(sampling=UNSEEDED), reply_to="mine")
    if num_tokens is not None:
        rig.turn()
        rig.add_workers()
        rig.run_until(lambda: len(rig.tokens("r")) == num_tokens)

    rig.kill(first)
    second = rig.add_scheduler(draw_seed=lambda: 41 if num_tokens is None else 1_000)
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
    rig.add_scheduler(draw_seed=lambda: 41, **{part: wire})
    rig.open_reply_queue("mine")
    rig.submit(make_request(sampling=UNSEEDED), reply_to="mine")
    rig.run_until(lambda: rig.num_crashes == 1)

    second = rig.add_scheduler(draw_seed=lambda: 41 if (method, after) == ("admit", False) else 0)
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

    first = rig.add_scheduler(draw_seed=lambda: 41, limits=SchedulerLimits(max_in_flight=1))
    rig.submit(make_request(sampling=UNSEEDED), reply_to="mine")
    first.turn(0.0)
    second = rig.add_scheduler(draw_seed=lambda: 1_000, ledger=LateSight())
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
