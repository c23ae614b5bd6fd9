"""A scheduler's turn: every accepted request ends once and is answered once."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.limits import SchedulerLimits
from services.scheduler.scheduler import Scheduler
from shared import codec
from shared.errors import StoreUnavailable
from shared.messages import ChatMessage, FinishReason, Request
from shared.topology import REQUESTS_QUEUE
from tests.faults import Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, expected_tokens, prompt_of, rig_tokenizer

PROMPT = prompt_of(20)


def make_request(request_id: str = "r", **changes: Any) -> Request:
    values: dict[str, Any] = {"token_ids": PROMPT, "sampling": SAMPLED}
    return Request(request_id, **(values | changes))


def text_of(tokens: list[int]) -> str:
    return rig_tokenizer().decode(tokens, skip_special=True)


def run_until_idle(rig: Rig, scheduler: Scheduler) -> None:
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0 and scheduler.num_in_flight == 0)


def test_a_request_is_answered_once_with_its_tokens_and_their_text() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")

    rig.submit(make_request(), reply_to="mine", correlation_id="c")
    run_until_idle(rig, scheduler)

    (reply,) = rig.replies("mine")
    tokens = expected_tokens(PROMPT, SAMPLED)
    assert reply.token_ids == tuple(tokens)
    assert reply.text == text_of(tokens)
    assert (reply.finish_reason, reply.num_prompt_tokens) == ("length", len(PROMPT))
    assert_answers(rig, [("r", PROMPT, SAMPLED)])
    assert scheduler.num_answered == 1


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_who_asks_in_json_is_answered_in_json(content_type: str) -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")
    tap = rig.new_broker()
    tap.consume("mine", prefetch=1)
    body = codec.encode_json(make_request())

    rig.publish(
        REQUESTS_QUEUE, body, content_type=content_type, reply_to="mine", correlation_id="c"
    )
    run_until_idle(rig, scheduler)

    delivery = tap.take(0.0)
    assert (delivery.content_type, delivery.correlation_id) == ("application/json", "c")
    reply = codec.decode(delivery.body, delivery.content_type)
    assert reply.token_ids == tuple(expected_tokens(PROMPT, SAMPLED))


def test_a_prompt_and_a_conversation_are_tokenised() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()

    rig.submit(make_request("text", token_ids=None, prompt="hello world"))
    rig.submit(make_request("chat", token_ids=None, messages=(ChatMessage("user", "hello world"),)))
    run_until_idle(rig, scheduler)

    prompt = tuple(rig_tokenizer().encode("hello world", parse_special=False))
    chat = rig_tokenizer().encode(
        "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n", parse_special=True
    )
    assert_answers(rig, [("text", prompt, SAMPLED), ("chat", tuple(chat), SAMPLED)])


def test_the_request_message_stays_unacked_until_its_final_event_is_stored() -> None:
    rig = Rig(2)
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")
    rig.submit(make_request(), reply_to="mine")
    for _ in range(20):
        rig.turn()
    assert rig.num_ready(REQUESTS_QUEUE) == 0

    rig.add_workers()
    while not rig.final_events("r"):
        assert rig.num_messages(REQUESTS_QUEUE) == 1
        assert rig.replies("mine") == []
        rig.turn()
    run_until_idle(rig, scheduler)

    assert len(rig.replies("mine")) == 1


def test_a_reply_that_is_not_confirmed_leaves_the_request_unacked() -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.open_reply_queue("mine")
    flaky = Tripwire(
        rig.new_broker(),
        "publish",
        StoreUnavailable("broker gone"),
        times=2,
        only_if=lambda messages: messages[0].queue == "mine",
    )
    scheduler = rig.add_scheduler(broker=flaky)

    rig.submit(make_request(), reply_to="mine")
    rig.run_until(lambda: flaky.num_calls == 2)
    assert rig.num_messages(REQUESTS_QUEUE) == 1
    run_until_idle(rig, scheduler)

    assert len(rig.replies("mine")) == 1


def test_kv_pages_are_deleted_at_the_end() -> None:
    rig = Rig(3)
    rig.add_workers()
    scheduler = rig.add_scheduler()

    rig.submit(make_request())
    rig.run_until(lambda: len(rig.tokens("r")) >= 3)
    assert min(rig.num_kv_rows("r")) > len(PROMPT)
    run_until_idle(rig, scheduler)

    assert rig.num_kv_rows("r") == [0, 0, 0]


def test_a_store_that_fails_at_the_end_delays_the_reply_and_does_not_double_it() -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.open_reply_queue("mine")
    flaky = Tripwire(rig.kv_pages, "delete", StoreUnavailable("down"), times=3)
    scheduler = rig.add_scheduler(kv_pages=flaky)

    rig.submit(make_request(), reply_to="mine")
    run_until_idle(rig, scheduler)

    assert flaky.num_calls == 4
    assert len(rig.replies("mine")) == 1
    assert rig.num_kv_rows("r") == [0, 0]


def test_a_reply_queue_that_is_gone_blocks_nobody() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")

    rig.submit(make_request("a"), reply_to="nowhere")
    rig.submit(make_request("b"), reply_to="mine")
    run_until_idle(rig, scheduler)

    assert [reply.request_id for reply in rig.replies("mine")] == ["b"]
    assert_answers(rig, [("a", PROMPT, SAMPLED), ("b", PROMPT, SAMPLED)])


def test_a_reply_queue_that_is_full_blocks_nobody_and_gets_its_reply_when_it_has_room() -> None:
    # given a client that does not read its replies
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("full", max_length=1)
    rig.open_reply_queue("mine")
    rig.publish("full", codec.encode(make_request()))

    rig.submit(make_request("a"), reply_to="full")
    rig.submit(make_request("b"), reply_to="mine")
    started_s = rig.clock()
    rig.run_until(lambda: scheduler.num_answered == 1)

    # then others are answered in time, and it is once it reads
    assert rig.clock() - started_s < 1.0
    assert len(rig.replies("mine")) == 1
    rig.take_all("full")
    rig.run_until(lambda: scheduler.num_answered == 2)
    assert [reply.request_id for reply in rig.replies("full")] == ["a"]
    assert rig.num_messages(REQUESTS_QUEUE) == 0


def test_a_reply_queue_that_stays_full_is_given_up() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler(limits=SchedulerLimits(reply_patience_s=3.0))
    rig.open_reply_queue("full", max_length=1)
    rig.publish("full", codec.encode(make_request()))

    rig.submit(make_request(), reply_to="full")
    rig.submit(Request("bad", token_ids=(99_999,)), reply_to="full")
    rig.publish(REQUESTS_QUEUE, b"garbage", reply_to="full")
    started_s = rig.clock()
    run_until_idle(rig, scheduler)

    assert 3.0 <= rig.clock() - started_s < 5.0
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


@pytest.mark.parametrize("answered_first", [False, True])
def test_a_request_that_is_sent_twice_is_generated_once_and_answered_twice(
    answered_first: bool,
) -> None:
    rig = Rig(2)
    rig.add_workers()
    steps = Tripwire(
        rig.new_broker(),
        "publish",
        StoreUnavailable,
        times=0,
        only_if=lambda messages: messages[0].queue == rig.queue(0),
    )
    scheduler = rig.add_scheduler(broker=steps)
    rig.open_reply_queue("mine")

    rig.submit(make_request(), reply_to="mine", correlation_id="c")
    if answered_first:
        run_until_idle(rig, scheduler)
    rig.submit(make_request(), reply_to="mine", correlation_id="c")
    run_until_idle(rig, scheduler)

    first, second = rig.replies("mine")
    assert first == second
    assert steps.num_calls == 1
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_many_requests_are_each_answered() -> None:
    rig = Rig(2)
    rig.add_workers(2)
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")
    asked = [
        (f"r{n}", prompt_of(5 + 7 * n, salt=n), GREEDY if n % 2 else SAMPLED) for n in range(8)
    ]

    for request_id, prompt, sampling in asked:
        rig.submit(Request(request_id, token_ids=prompt, sampling=sampling), reply_to="mine")
    run_until_idle(rig, scheduler)

    assert_answers(rig, asked)
    assert sorted(reply.request_id for reply in rig.replies("mine")) == [r for r, _, _ in asked]


def test_a_cancelled_request_is_answered_with_what_there_is() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")
    rig.submit(make_request(), reply_to="mine")
    rig.run_until(lambda: len(rig.tokens("r")) == 4)

    rig.ledger.finish("r", FinishReason.ABORT)
    run_until_idle(rig, scheduler)
    rig.run_until_quiet()

    (reply,) = rig.replies("mine")
    assert reply.finish_reason == "abort"
    assert reply.token_ids == tuple(expected_tokens(PROMPT, SAMPLED)[:4])
    assert rig.num_kv_rows("r") == [0, 0]
    assert len(rig.final_events("r")) == 1


@pytest.mark.parametrize("method", ["get", "admit", "states", "tokens"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_ledger_that_fails_for_a_while_only_delays(method: str, after: bool) -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.open_reply_queue("mine")
    flaky = Tripwire(rig.ledger, method, StoreUnavailable("down"), after=after, times=2)
    scheduler = rig.add_scheduler(ledger=flaky)

    rig.submit(make_request("a"), reply_to="mine")
    rig.submit(make_request("b"), reply_to="mine")
    run_until_idle(rig, scheduler)

    assert flaky.num_calls > 2 or (method, after) == ("admit", True)
    assert sorted(reply.request_id for reply in rig.replies("mine")) == ["a", "b"]
    assert_answers(rig, [("a", PROMPT, SAMPLED), ("b", PROMPT, SAMPLED)])
