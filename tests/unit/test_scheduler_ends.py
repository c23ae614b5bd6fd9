"""How requests end that cannot run or no longer run: refused, overdue, uncovered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.scheduler.limits import SchedulerLimits
from services.scheduler.scheduler import Scheduler
from shared import codec
from shared.errors import ErrorCode
from shared.messages import FinishReason, Reply, Request
from shared.policy import RedriveLimits
from shared.store import keys
from shared.topology import REQUESTS_QUEUE
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

PROMPT = prompt_of(20)
GRACE = SchedulerLimits(coverage_check_s=1.0, redrive=RedriveLimits(uncovered_grace_s=10.0))


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
    ("changes", "reason", "code", "param"),
    [
        (
            {"token_ids": prompt_of(256)},
            "256 tokens",
            ErrorCode.CONTEXT_LENGTH,
            "token_ids",
        ),
        ({"token_ids": (5, 268)}, "268", ErrorCode.INVALID_VALUE, "token_ids"),
        ({"model": "other"}, "other", ErrorCode.MODEL_NOT_FOUND, "model"),
        ({"token_ids": None, "prompt": ""}, "no tokens", ErrorCode.INVALID_VALUE, "prompt"),
    ],
)
def test_a_request_that_cannot_be_served_has_a_final_event_and_a_reply(
    changes: dict[str, Any], reason: str, code: ErrorCode, param: str
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
    for told in (final, first):
        assert (told.error_code, told.error_param) == (code, param)
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


def test_a_request_of_a_model_that_is_not_served_any_more_ends_by_name() -> None:
    rig = Rig(2)
    rig.open_reply_queue("mine")
    rig.admit("r", PROMPT)
    rig.stores.meta.run(("HSET", keys.ledger("r"), "model_id", "other@0"))

    scheduler = rig.add_scheduler()
    rig.add_workers()
    rig.submit(make_request("r"), reply_to="mine")
    run_until_idle(rig, scheduler)

    (reply,) = rig.replies("mine")
    assert "other@0 is not served" in reply.error
    assert rig.tokens("r") == []


def test_a_full_reply_queue_of_one_keeps_no_room_from_others() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler(limits=SchedulerLimits(max_in_flight=1, settle_after_s=3.0))
    rig.open_reply_queue("full", max_length=0)
    rig.open_reply_queue("mine")
    rig.submit(make_request("stuck"), reply_to="full")
    rig.run_until(lambda: "stuck" in rig.ledger.states(["stuck"]))
    rig.run_until_done("stuck")

    rig.submit(make_request("other"), reply_to="mine")
    rig.run_until(lambda: rig.num_ready("mine") == 1)

    assert scheduler.num_in_flight == 1  # its reply is still tried
    assert scheduler.reserved_kv_bytes == 0
