"""What a gateway reads of the store: events of many requests at once, and notes of its answers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from shared.errors import RequestError, StoreDamaged
from shared.messages import FinishReason
from shared.store import keys
from shared.store.completions import Completions
from shared.store.connection import Stores
from shared.store.ledger import Ledger
from shared.store.ledger_base import START, RequestLedger
from shared.store.ledger_types import FinalEvent, LedgerRecord, TokenEvent
from shared.store.memory_ledger import MemoryLedger
from tests.contract.conftest import open_stores
from tests.rig import GREEDY


def admit_three(ledger: RequestLedger) -> RequestLedger:
    """Requests a, b and c; a and b have tokens."""
    for name in ("a", "b", "c"):
        assert ledger.admit(LedgerRecord(name, "m@0", "l", (1, 2), GREEDY, max_position=9))
    ledger.commit("a", 0, 2, [7, 8, 9])
    ledger.commit("b", 0, 2, [5])
    ledger.finish("b", FinishReason.LENGTH)
    return ledger


@pytest.fixture(params=["process", "memory", pytest.param("redis", marks=pytest.mark.servers)])
def ledger(request: pytest.FixtureRequest) -> Iterator[RequestLedger]:
    with ExitStack() as stack:
        if request.param == "process":
            yield admit_three(MemoryLedger())
        else:
            stores = stack.enter_context(open_stores(request.param, request))
            yield admit_three(Ledger(stores.meta))


def test_each_request_is_read_from_its_own_place(ledger: RequestLedger) -> None:
    found = ledger.events_of({"a": "3-0", "b": START, "c": START})

    assert [e.token_id for e in found["a"] if isinstance(e, TokenEvent)] == [9]
    assert isinstance(found["b"][-1], FinalEvent)
    assert set(found) == {"a", "b"}, "of c there is nothing yet"


def test_a_wait_ends_without_events(ledger: RequestLedger) -> None:
    assert ledger.events_of({"c": START}, block_ms=5) == {}
    assert ledger.events_of({}) == {}


def test_a_wait_ends_with_the_first_event_of_any(ledger: RequestLedger) -> None:
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(ledger.events_of, {"a": "4-0", "c": START}, block_ms=2_000)
        ledger.commit("c", 0, 2, [6])

        (event,) = reading.result()["c"]

    assert isinstance(event, TokenEvent)
    assert event.token_id == 6


def test_one_that_cannot_be_read_has_failed_and_the_others_are_read(stores: Stores) -> None:
    ledger = admit_three(Ledger(stores.meta))
    is_real = stores.meta.name != "memory"  # the other one does not look at types
    stores.meta.run(("XADD", keys.events("c"), "2-0", "garbage", "x"))
    if is_real:
        stores.meta.run(("SET", keys.events("d"), "no stream"))

    found = ledger.events_of({"a": START, "c": START, **({"d": START} if is_real else {})})

    assert len(found["a"]) == 3
    for name in ("c", "d") if is_real else ("c",):
        (event,) = found[name]
        assert isinstance(event, FinalEvent)
        assert event.finish_reason is FinishReason.ERROR


def test_a_malformed_place_is_refused(ledger: RequestLedger) -> None:
    with pytest.raises(RequestError, match="event id"):
        ledger.events_of({"a": "$"})


def test_notes_are_found_again_and_garbled_ones_named(stores: Stores) -> None:
    completions = Completions(stores.meta)
    completions.put("x", {"n": 2, "stops": ["é"]}, ttl_s=60)
    completions.take("x", "me", ttl_s=60)
    stores.meta.run(("SET", keys.completion("y"), b"\xff{"))

    assert completions.get("x") == {"n": 2, "stops": ["é"]}
    assert completions.get("none") is None
    assert (completions.reader("x"), completions.reader("none")) == ("me", "")
    with pytest.raises(StoreDamaged, match="the note of y"):
        completions.get("y")
