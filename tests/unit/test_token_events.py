"""Who asks for it hears of each token in the reply queue, in order, and then has the reply."""

from __future__ import annotations

from typing import Any

from shared import codec
from shared.messages import FinishReason, Reply, Request, Token
from shared.store import keys
from shared.topology import REQUESTS_QUEUE
from tests.rig import Rig
from tests.rig_model import GREEDY, expected_tokens, prompt_of

PROMPT = prompt_of(5)
REQUEST = Request("r", token_ids=PROMPT, sampling=GREEDY, stream=True)


def rig_with_queue(max_length: int | None = None) -> Rig:
    rig = Rig(2)
    rig.add_workers()
    rig.add_scheduler()
    rig.open_reply_queue("mine", max_length)
    return rig


def assert_whole(told: list[Any]) -> None:
    """All tokens, each once and in order, and then the reply."""
    *tokens, reply = told
    expected = expected_tokens(PROMPT, GREEDY)
    assert [(token.index, token.token_id) for token in tokens] == list(enumerate(expected))
    assert isinstance(reply, Reply)
    assert list(reply.token_ids) == expected
    assert reply.text.startswith("".join(token.text for token in tokens))


def test_tokens_come_as_they_are_generated_and_the_reply_last() -> None:
    rig = rig_with_queue()

    rig.submit(REQUEST, reply_to="mine", correlation_id="c")
    rig.run_until(lambda: rig.num_ready("mine") >= 3)
    assert rig.record("r").finish_reason is None, "the first came only at the end"
    rig.run_until_quiet()

    deliveries = rig.take_deliveries("mine")
    assert {delivery.correlation_id for delivery in deliveries} == {"c"}
    assert_whole([codec.decode(x.body, x.content_type) for x in deliveries])


def test_a_json_request_has_json_tokens() -> None:
    rig = rig_with_queue()

    rig.publish(
        REQUESTS_QUEUE,
        b'{"request_id": "r", "prompt": "hello", "stream": true, "sampling": {"max_tokens": 4}}',
        content_type="application/json",
        reply_to="mine",
    )
    rig.run_until_quiet()

    deliveries = rig.take_deliveries("mine")
    assert {delivery.content_type for delivery in deliveries} == {"application/json"}
    assert b'"kind":"token.v1"' in deliveries[0].body
    assert b'"kind":"reply.v1"' in deliveries[-1].body


def test_who_does_not_ask_hears_the_reply_alone() -> None:
    rig = rig_with_queue()

    rig.submit(Request("r", token_ids=PROMPT, sampling=GREEDY), reply_to="mine")
    rig.run_until_quiet()

    (reply,) = rig.take_all("mine")
    assert isinstance(reply, Reply)


def test_another_scheduler_tells_all_of_it_again_in_the_same_words() -> None:
    rig = rig_with_queue()
    rig.submit(REQUEST, reply_to="mine")
    rig.run_until(lambda: rig.num_ready("mine") >= 3)
    rig.kill(rig.actors[-1])
    before = rig.take_all("mine")

    rig.add_scheduler()
    rig.run_until_quiet()

    again = rig.take_all("mine")
    assert again[: len(before)] == before
    assert_whole(again)


def test_a_request_sent_twice_has_its_tokens_once_in_each_queue() -> None:
    rig = rig_with_queue()
    rig.open_reply_queue("other")

    rig.submit(REQUEST, reply_to="mine")
    rig.run_until(lambda: rig.num_ready("mine") >= 3)
    rig.submit(REQUEST, reply_to="other")
    rig.run_until_quiet()

    assert_whole(rig.take_all("mine"))
    assert_whole(rig.take_all("other"))


def test_a_message_that_returns_is_not_told_again() -> None:
    rig = rig_with_queue()
    rig.submit(REQUEST, reply_to="mine")
    rig.submit(REQUEST, reply_to="mine")
    rig.run_until_quiet()

    told = rig.take_all("mine")

    assert len([message for message in told if isinstance(message, Token)]) == GREEDY.max_tokens
    assert len([message for message in told if isinstance(message, Reply)]) == 2


def test_who_asks_for_what_has_ended_has_all_of_it_at_once() -> None:
    rig = rig_with_queue()
    rig.submit(REQUEST)
    rig.run_until_quiet()

    rig.submit(REQUEST, reply_to="mine")
    rig.run_until_quiet()

    assert_whole(rig.take_all("mine"))


def test_a_reply_queue_that_is_gone_or_full_holds_nobody_up() -> None:
    rig = rig_with_queue(max_length=1)

    rig.submit(REQUEST, reply_to="mine")
    rig.submit(Request("gone", token_ids=PROMPT, sampling=GREEDY, stream=True), reply_to="nowhere")
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) <= 1)
    told = []
    while not (told and isinstance(told[-1], Reply)):
        told += rig.take_all("mine")
        rig.turn()

    assert list(told[-1].token_ids) == expected_tokens(PROMPT, GREEDY)
    assert rig.tokens("gone") == list(told[-1].token_ids)


def test_a_cancelled_request_ends_with_its_reply() -> None:
    rig = rig_with_queue()
    rig.submit(REQUEST, reply_to="mine")
    rig.run_until(lambda: len(rig.tokens("r")) == 4)

    rig.ledger.finish("r", FinishReason.ABORT)
    rig.run_until_quiet()

    *tokens, reply = rig.take_all("mine")
    assert [token.token_id for token in tokens] == list(reply.token_ids)
    assert reply.finish_reason is FinishReason.ABORT
    assert reply.text.startswith("".join(token.text for token in tokens))


def test_damaged_events_end_in_a_reply_by_name() -> None:
    rig = rig_with_queue()
    rig.submit(REQUEST, reply_to="mine")
    rig.run_until(lambda: len(rig.tokens("r")) == 4)
    rig.stores.meta.run(("XADD", keys.events("r"), "9999-0", "rubbish", "x"))
    rig.ledger.finish("r", FinishReason.ABORT)
    rig.run_until_quiet()

    reply = rig.take_all("mine")[-1]
    assert isinstance(reply, Reply)
    assert reply.finish_reason is FinishReason.ERROR
