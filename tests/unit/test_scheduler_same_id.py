"""Two questions under one id: nobody is given the answer to another's question."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shared import codec
from shared.codec import JSON, MSGPACK
from shared.messages import Reply, Request
from shared.store import keys
from shared.topology import REQUESTS_QUEUE
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, expected_tokens, prompt_of

PROMPT = prompt_of(9)
FIRST = Request("r", token_ids=PROMPT, sampling=SAMPLED)
OTHERS = {
    "prompt": replace(FIRST, token_ids=prompt_of(4)),
    "kind of prompt": replace(FIRST, token_ids=None, prompt="hello"),
    "sampling": replace(FIRST, sampling=replace(SAMPLED, temperature=0.1)),
    "length": replace(FIRST, sampling=replace(SAMPLED, max_tokens=3)),
    "streamed": replace(FIRST, token_ids=prompt_of(4), stream=True),
}


def rig_with_two_schedulers() -> Rig:
    rig = Rig(2)
    rig.add_workers()
    rig.add_scheduler()
    rig.add_scheduler()
    rig.open_reply_queue("replies")
    return rig


def ask(rig: Rig, request: Request, who: str, **changes: Any) -> None:
    rig.submit(request, reply_to="replies", correlation_id=who, **changes)


def answers(rig: Rig) -> dict[str, list[Reply]]:
    """The replies by who asked."""
    found: dict[str, list[Reply]] = {}
    for delivery in rig.take_deliveries("replies"):
        message = codec.decode(delivery.body, delivery.content_type)
        assert isinstance(message, Reply), "whoever was refused is told of no token"
        found.setdefault(delivery.correlation_id, []).append(message)
    return found


@pytest.mark.parametrize("moment", ["at once", "while it runs", "after its end"])
@pytest.mark.parametrize("other", OTHERS.values(), ids=list(OTHERS))
def test_another_question_under_a_taken_id_is_refused_by_name(other: Request, moment: str) -> None:
    rig = rig_with_two_schedulers()

    ask(rig, FIRST, "first")
    if moment == "while it runs":
        rig.run_until(lambda: "r" in rig.ledger.states(["r"]) and len(rig.tokens("r")) >= 2)
    elif moment == "after its end":
        rig.run_until(lambda: "r" in rig.ledger.states(["r"]))
        rig.run_until_done("r")
        rig.run_until_quiet()
    ask(rig, other, "other")
    rig.run_until_quiet()

    found = answers(rig)
    (first,), (refusal,) = found["first"], found["other"]
    assert list(first.token_ids) == expected_tokens(tuple(PROMPT), SAMPLED)
    assert "request id r belongs to another request" in refusal.error
    assert refusal.token_ids == ()
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


@pytest.mark.parametrize("content_type", [MSGPACK, JSON])
def test_the_same_question_again_has_the_same_answer(content_type: str) -> None:
    rig = rig_with_two_schedulers()
    again = replace(FIRST, deadline_unix_ms=2**50)  # another attempt, with time of its own
    body = codec.encode_json(again) if content_type == JSON else codec.encode(again)

    ask(rig, FIRST, "first")
    rig.publish(
        REQUESTS_QUEUE, body, content_type=content_type, reply_to="replies", correlation_id="other"
    )
    rig.run_until_quiet()

    found = answers(rig)
    (first,), (second,) = found["first"], found["other"]
    assert first == second
    assert not first.error
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_what_a_dead_scheduler_held_is_adopted_though_it_digested_it_otherwise() -> None:
    rig = Rig(2)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.submit(FIRST)
    rig.run_until(lambda: "r" in rig.ledger.states(["r"]) and len(rig.tokens("r")) >= 2)
    rig.kill(scheduler)
    rig.stores.meta.run(("HSET", keys.ledger("r"), "content", "of another version"))

    rig.add_scheduler()
    rig.run_until_done("r")

    assert_answers(rig, [("r", PROMPT, SAMPLED)])
