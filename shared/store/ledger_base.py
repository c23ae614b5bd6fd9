"""What every ledger can do, on Redis or in this process. Knows no key and no connection."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from shared.errors import RequestError, StoreDamaged
from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason
from shared.store.ledger_types import (
    Commit,
    CommitResult,
    Event,
    LedgerRecord,
    RequestState,
    TokenEvent,
)

START = "0-0"  # before the first event
MAX_ERROR_CHARS = 2000
_EVENT_ID = re.compile(r"(\d{1,19})-(\d{1,19})\Z", re.ASCII)


class RequestLedger(Protocol):
    """Requests by id. What each method promises stands at `Ledger`; one contract suite holds all.

    May be used from any thread.
    """

    def admit(self, record: LedgerRecord) -> bool: ...

    def refuse(self, record: LedgerRecord) -> bool: ...

    def bury(self, record: LedgerRecord) -> None: ...

    def get(self, request_id: str) -> LedgerRecord | None: ...

    def commit(
        self,
        request_id: str,
        epoch: int,
        position: int,
        token_ids: Sequence[int],
        finish: FinishReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> CommitResult: ...

    def start_commits(
        self, commits: Sequence[Commit]
    ) -> Callable[[], list[CommitResult | StoreDamaged]]: ...

    def finish(
        self, request_id: str, reason: FinishReason, error: str = "", code: str = ""
    ) -> bool: ...

    def note_cached(self, request_id: str, num_cached: int) -> None: ...

    def advance_epoch(self, request_id: str, expected: int, new: int) -> int | None: ...

    def events(
        self, request_id: str, after: str = START, block_ms: int = 0, count: int = 256
    ) -> list[Event]: ...

    def events_of(
        self, after: Mapping[str, str], block_ms: int = 0, count: int = 256
    ) -> dict[str, list[Event]]: ...

    def states(self, request_ids: Iterable[str]) -> dict[str, RequestState]: ...

    def tokens(self, request_id: str) -> list[int]: ...

    def now_unix_ms(self) -> int: ...


def token_events(ledger: RequestLedger, request_id: str) -> list[TokenEvent]:
    """The tokens generated so far, with their log probabilities. Raises `DecodeError`."""
    found: list[TokenEvent] = []
    after = START
    while events := ledger.events(request_id, after):
        found += [event for event in events if isinstance(event, TokenEvent)]
        after = events[-1].event_id
    return found


def read_event_id(text: str) -> tuple[int, int]:
    """Position and number of an event id. Raises `RequestError` for a malformed one."""
    match = _EVENT_ID.match(text)
    if match is None:
        raise RequestError(f"event id must be <position>-<number>, got {text!r:.80}")
    return int(match[1]), int(match[2])
