"""What a ledger in a store does about records and events that were lost or damaged there."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest

from shared.errors import DecodeError, StoreDamaged
from shared.messages import FinishReason
from shared.store import keys
from shared.store.connection import Stores
from shared.store.ledger import Ledger
from shared.store.ledger_types import (
    AlreadyCommitted,
    Committed,
    FinalEvent,
)
from tests.contract.test_store_ledger import RECORD


@pytest.fixture
def ledger(stores: Stores) -> Ledger:
    ledger = Ledger(stores.meta)
    assert ledger.admit(RECORD)
    return ledger


def test_a_garbled_record_is_a_decode_error(ledger: Ledger, stores: Stores) -> None:
    stores.meta.run(("HSET", keys.ledger("req-1"), "max_position", "many"))

    with pytest.raises(DecodeError, match="ledger of request req-1"):
        ledger.get("req-1")


def test_lost_events_refuse_many_tokens_whole(ledger: Ledger, stores: Stores) -> None:
    ledger.commit("req-1", 4, 3, [11])
    stores.meta.run(("DEL", keys.events("req-1")))

    with pytest.raises(StoreDamaged):
        ledger.commit("req-1", 4, 4, [12, 13])

    assert ledger.tokens("req-1") == []
    record = ledger.get("req-1")
    assert record is not None
    assert record.committed_position == 3


def test_a_record_of_before_steps_of_many_tokens_is_judged_as_then(
    ledger: Ledger, stores: Stores
) -> None:
    ledger.commit("req-1", 4, 3, [11])
    stores.meta.run(("HDEL", keys.ledger("req-1"), "first"))

    assert ledger.commit("req-1", 4, 3, [99]) == AlreadyCommitted((11,), None)
    assert ledger.commit("req-1", 4, 4, [12]) == Committed()


def test_every_key_of_a_request_ends_some_day(ledger: Ledger, stores: Stores) -> None:
    def ttls() -> list[int]:
        names = (keys.ledger("req-1"), keys.events("req-1"))
        return [stores.meta.run(("PTTL", name)) for name in names]

    ledger.commit("req-1", 4, 3, [11])
    running = ttls()
    ledger.finish("req-1", FinishReason.LENGTH)
    finished = ttls()

    assert all(3_600_000 < ttl <= 86_400_000 for ttl in running)
    assert all(0 < ttl <= 3_600_000 for ttl in finished)


def test_a_buried_request_ends_after_the_last_token_that_a_reader_saw(
    ledger: Ledger, stores: Stores
) -> None:
    for position in (3, 4, 5):
        ledger.commit("req-1", 4, position, [position])
    stores.meta.run(("DEL", keys.ledger("req-1")))

    ledger.bury(dataclasses.replace(RECORD, prompt_token_ids=(), error="lost"))

    (final,) = ledger.events("req-1", after="5-0")
    assert isinstance(final, FinalEvent)
    assert (final.finish_reason, final.error) == (FinishReason.ERROR, "lost")
    assert ledger.tokens("req-1") == []


def test_a_request_with_events_and_no_record_is_not_admitted_again(
    ledger: Ledger, stores: Stores
) -> None:
    ledger.commit("req-1", 4, 3, [11])
    stores.meta.run(("DEL", keys.ledger("req-1")))

    with pytest.raises(StoreDamaged, match="record of request req-1"):
        ledger.admit(RECORD)


DAMAGES = [
    ("ledger", "SET", "garbage"),
    ("ledger", "HDEL", "committed"),
    ("ledger", "HSET", "committed", "x"),
    ("ledger", "HSET", "finish_reason", "x"),
    ("events", "SET", "garbage"),
    ("events", "XADD", "999999-0", "zz", "1"),
    ("events", "DEL"),
]


@pytest.mark.parametrize("command", DAMAGES)
def test_a_damaged_request_is_ended_or_buried_and_never_retried(
    ledger: Ledger, stores: Stores, command: tuple[str, ...]
) -> None:
    ledger.commit("req-1", 4, 3, [11])
    key = {"ledger": keys.ledger, "events": keys.events}[command[0]]("req-1")
    stores.meta.run((command[1], key, *command[2:]))

    with contextlib.suppress(StoreDamaged):
        ledger.commit("req-1", 4, 3, [11])
    with contextlib.suppress(StoreDamaged):
        ledger.commit("req-1", 4, 4, [12], FinishReason.LENGTH)
    ledger.finish("req-1", FinishReason.ERROR, "damaged")
    state = ledger.states(["req-1", "nobody"])["req-1"]

    assert state.finish_reason is not None
    ledger.bury(dataclasses.replace(RECORD, prompt_token_ids=(), error="damaged"))
    assert ledger.get("req-1") is not None
    assert [type(event) for event in ledger.events("req-1")] == [FinalEvent]
