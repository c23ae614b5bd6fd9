"""No message in the request queue stops a scheduler, whatever it is or names."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from shared.codec import JSON
from shared.messages import Request
from shared.store import keys
from shared.topology import REQUESTS_QUEUE
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

PROMPT = prompt_of(5)
NO_UTF8 = b"\xff\xfe".decode("utf-8", "surrogateescape")  # what a broker makes of such a property


def answers_the_next(rig: Rig) -> bool:
    rig.submit(Request("next", token_ids=PROMPT, sampling=SAMPLED))
    rig.run_until(lambda: "next" in rig.ledger.states(["next"]))
    rig.run_until_done("next")
    assert_answers(rig, [("next", PROMPT, SAMPLED)])
    return True


@pytest.mark.parametrize("field", ["content_type", "correlation_id", "reply_to"])
def test_a_property_that_is_no_utf8_is_refused_or_returned_as_it_came(field: str) -> None:
    rig = Rig(2)
    rig.add_scheduler()
    rig.add_workers()
    rig.open_reply_queue("replies")
    properties = {"reply_to": "replies", "content_type": "text/plain"} | {field: NO_UTF8}

    rig.publish(REQUESTS_QUEUE, b"garbage", **properties)
    rig.run_until_quiet()

    if field != "reply_to":
        (delivery,) = rig.take_deliveries("replies")
        assert delivery.correlation_id == properties.get("correlation_id", "")
    assert rig.num_dead() == 1
    assert answers_the_next(rig)


@pytest.mark.parametrize(
    "leftover", [("SET", "garbage"), ("XADD", "7-0", "t", "1")], ids=["of another type", "tokens"]
)
def test_an_unreadable_message_that_names_a_damaged_request_stops_no_scheduler(
    leftover: Sequence[str],
) -> None:
    rig = Rig(2)
    rig.add_scheduler()
    rig.add_workers()
    command, *arguments = leftover
    rig.stores.meta.run((command, keys.events("victim"), *arguments))

    body = json.dumps({"request_id": "victim", "prompt": 7}).encode()
    rig.publish(REQUESTS_QUEUE, body, content_type=JSON)
    rig.run_until_quiet()

    assert [end.finish_reason for end in rig.final_events("victim")] == ["error"]
    assert rig.num_dead() == 1
    assert answers_the_next(rig)
