"""A key that holds what cellpipe did not write ends one request by name; its neighbours go on.

Each damage is done in the middle of an answer, while a reader has seen some of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.scheduler.scheduler import Scheduler
from shared.messages import Request
from shared.store import keys
from shared.store.ledger_types import FinalEvent
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

PROMPT = prompt_of(20)
VICTIM, OTHER = "victim", "other"
LEDGER, EVENTS = keys.ledger(VICTIM), keys.events(VICTIM)

RECORD_DAMAGES = {
    "record gone": [("DEL", LEDGER)],
    "record of another type": [("SET", LEDGER, "garbage")],
    "field gone": [("HDEL", LEDGER, "committed")],
    "number garbled": [("HSET", LEDGER, "committed", "xyz")],
    "reason garbled": [("HSET", LEDGER, "finish_reason", "xyz")],
    "sampling garbled": [("HSET", LEDGER, "sampling", "{")],
    "all gone": [("DEL", LEDGER), ("DEL", EVENTS)],
    "events gone": [("DEL", EVENTS)],
    "events of another type": [("SET", EVENTS, "garbage")],
    "event garbled": [("XADD", EVENTS, "999999-0", "zz", "1")],
    "token garbled": [("XADD", EVENTS, "999999-0", "t", "many")],
    "token outside the vocabulary": [("XADD", EVENTS, "999999-0", "t", "77777777")],
}


def start_two(rig: Rig) -> Scheduler:
    """Two requests of which the victim has some tokens, but not all."""
    scheduler = rig.add_scheduler()
    rig.add_workers()
    rig.open_reply_queue("replies")
    for request_id in (VICTIM, OTHER):
        request = Request(request_id, token_ids=PROMPT, sampling=SAMPLED)
        rig.submit(request, reply_to="replies")
    rig.run_until(lambda: len(rig.tokens(VICTIM)) >= 3)
    return scheduler


def damage(rig: Rig, commands: Sequence[Sequence[str]]) -> None:
    for command in commands:
        rig.stores.meta.run(command)


@pytest.mark.parametrize("commands", RECORD_DAMAGES.values(), ids=list(RECORD_DAMAGES))
def test_a_damaged_record_ends_its_request_by_name_and_no_other(
    commands: Sequence[Sequence[str]],
) -> None:
    rig = Rig(2)
    scheduler = start_two(rig)
    (*_, seen) = rig.ledger.events(VICTIM)

    damage(rig, commands)
    rig.run_until(lambda: scheduler.num_in_flight == 0)
    rig.run_until_quiet()

    ends = [e for e in rig.ledger.events(VICTIM, after=seen.event_id) if isinstance(e, FinalEvent)]
    replies = {reply.request_id: reply for reply in rig.replies("replies")}
    assert [end.finish_reason for end in ends] == ["error"]
    assert replies[VICTIM].error == ends[0].error
    assert "new id" in ends[0].error
    assert rig.num_crashes == 0
    assert_answers(rig, [(OTHER, PROMPT, SAMPLED)])
    assert not [k for k in rig.stores.kv.run(("KEYS", "*")) if b":kv:" in k]


@pytest.mark.parametrize("name", [name for name in RECORD_DAMAGES if name != "all gone"])
def test_a_scheduler_that_finds_a_damaged_record_ends_its_request(name: str) -> None:
    rig = Rig(2)
    rig.kill(start_two(rig))

    damage(rig, RECORD_DAMAGES[name])
    scheduler = rig.add_scheduler()
    rig.run_until_quiet()
    rig.run_until(lambda: scheduler.num_in_flight == 0)

    assert {reply.request_id for reply in rig.replies("replies")} == {VICTIM, OTHER}
    assert rig.record(VICTIM).finish_reason is not None
    assert_answers(rig, [(OTHER, PROMPT, SAMPLED)])


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("page", [0, 1])
def test_a_kv_page_of_another_type_is_written_again(group: int, page: int) -> None:
    rig = Rig(2, prefix_bytes=None)  # or its pages have moved
    scheduler = start_two(rig)
    key = keys.kv_page(VICTIM, rig.layout.layout_id, group, page)

    rig.stores.kv.run(("DEL", key))
    rig.stores.kv.run(("HSET", key, "a", "b"))
    rig.run_until(lambda: scheduler.num_in_flight == 0)

    assert rig.num_crashes == 0
    assert_answers(rig, [(VICTIM, PROMPT, SAMPLED), (OTHER, PROMPT, SAMPLED)])


def test_a_kv_page_of_another_type_that_must_be_read_ends_its_request_by_name() -> None:
    rig = Rig(1, prefix_bytes=None)
    scheduler = rig.add_scheduler()
    worker = rig.add_worker(0)
    for request_id in (VICTIM, OTHER):
        rig.submit(Request(request_id, token_ids=PROMPT, sampling=SAMPLED))
    rig.run_until(lambda: len(rig.tokens(VICTIM)) >= 3)
    rig.kill(worker)

    key = keys.kv_page(VICTIM, rig.layout.layout_id, 0, 0)
    rig.stores.kv.run(("DEL", key))
    rig.stores.kv.run(("HSET", key, "a", "b"))
    rig.add_worker(0)
    rig.run_until(lambda: scheduler.num_in_flight == 0)

    assert "damaged" in rig.record(VICTIM).error
    assert rig.num_crashes == 0
    assert_answers(rig, [(OTHER, PROMPT, SAMPLED)])
