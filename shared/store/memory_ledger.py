"""The ledger of a pipeline that is one process: the promises of `Ledger` without a server.

Nothing here is lost or damaged but with the process, so nothing raises `StoreDamaged`. One lock
for all requests; a reader who waits for an event sleeps until its request has one. Longer than
other modules, as the ledger that it stands for.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.errors import StoreDamaged
from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason
from shared.store.ledger_base import MAX_ERROR_CHARS, START, read_event_id
from shared.store.ledger_entry import Entry, EventId, event_text
from shared.store.ledger_types import (
    AlreadyCommitted,
    Commit,
    CommitResult,
    Committed,
    Event,
    Fenced,
    FinalEvent,
    Finished,
    Gap,
    LedgerRecord,
    RequestState,
    Stale,
    Unknown,
)

RENEW_EVERY = 256  # tokens: a sign of life, as the first one is
SWEEP_EVERY_S = 60.0


class MemoryLedger:
    """Requests by id, in this process.

    A record and its events live `running_ttl_s` after the record's last sign of life, and
    `finished_ttl_s` after the end; `clock` (seconds) tells. Memory is given back within a minute
    of that, when further requests come.
    """

    def __init__(
        self,
        *,
        running_ttl_s: float = 86_400,
        finished_ttl_s: float = 3_600,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running_ttl_s = running_ttl_s
        self._finished_ttl_s = finished_ttl_s
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._readers: dict[str, _Readers] = {}
        self._pausing: dict[str, _Readers] = {}
        self._followers = _Readers(threading.Condition(self._lock))  # each of many requests
        self._sweep_at_s = clock() + SWEEP_EVERY_S

    def __len__(self) -> int:
        """How many records take room, those included whose time is over."""
        return len(self._entries)

    @property
    def num_readers(self) -> int:
        """How many readers wait."""
        with self._lock:
            waiting = [self._followers, *self._readers.values(), *self._pausing.values()]
            return sum(readers.num_waiting for readers in waiting)

    def admit(self, record: LedgerRecord) -> bool:
        with self._lock:
            if self._entry(record.request_id) is not None:
                return False
            self._add(record, self._running_ttl_s)
            return True

    def refuse(self, record: LedgerRecord) -> bool:
        with self._lock:
            if self._entry(record.request_id) is not None:
                return False
            self._add_ended(record, (0, 1))
            return True

    def bury(self, record: LedgerRecord) -> None:
        with self._lock:
            # The time in ms: after every position, so that a reader who has seen tokens sees it.
            self._add_ended(record, (time.time_ns() // 1_000_000, 0))

    def get(self, request_id: str) -> LedgerRecord | None:
        with self._lock:
            entry = self._entry(request_id)
            return None if entry is None else entry.as_record()

    def commit(
        self,
        request_id: str,
        epoch: int,
        position: int,
        token_ids: Sequence[int],
        finish: FinishReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> CommitResult:
        with self._lock:
            entry = self._entry(request_id)
            if entry is None:
                return Unknown()
            if entry.epoch != epoch:
                return Fenced(entry.epoch)
            num_prompt = entry.num_prompt
            committed = num_prompt + len(entry.generated) - 1
            if num_prompt <= position <= committed and position == entry.first:
                won = entry.generated[position - num_prompt :]
                return AlreadyCommitted(tuple(won), entry.finish_reason)
            if position <= committed:
                return Stale()
            if entry.finish_reason is not None:
                return Finished(entry.finish_reason)
            if position != committed + 1:
                return Gap(committed)
            entry.generated += array("i", token_ids)
            entry.logprobs += [each.packed for each in logprobs]
            entry.first = position
            passed = (committed + len(token_ids)) // RENEW_EVERY - committed // RENEW_EVERY
            if finish is not None:
                self._end(entry, finish)
            elif position == num_prompt or passed:
                entry.expires_at_s = self._clock() + self._running_ttl_s
            self._wake(request_id, is_end=finish is not None)
            return Committed()

    def start_commits(
        self, commits: Sequence[Commit]
    ) -> Callable[[], list[CommitResult | StoreDamaged]]:
        results: list[CommitResult | StoreDamaged] = [
            self.commit(c.request_id, c.epoch, c.position, c.token_ids, c.finish, c.logprobs)
            for c in commits
        ]
        return lambda: results

    def finish(
        self, request_id: str, reason: FinishReason, error: str = "", code: str = ""
    ) -> bool:
        with self._lock:
            entry = self._entry(request_id)
            if entry is None or entry.finish_reason is not None:
                return False
            entry.error, entry.error_code = error[:MAX_ERROR_CHARS], code
            self._end(entry, reason)
            self._wake(request_id, is_end=True)
            return True

    def note_cached(self, request_id: str, num_cached: int) -> None:
        with self._lock:
            if entry := self._entry(request_id):
                entry.num_cached = num_cached

    def advance_epoch(self, request_id: str, expected: int, new: int) -> int | None:
        with self._lock:
            entry = self._entry(request_id)
            if entry is None:
                return None
            if entry.epoch == expected and entry.finish_reason is None:
                entry.epoch = new
                entry.expires_at_s = self._clock() + self._running_ttl_s
            return entry.epoch

    def events(
        self, request_id: str, after: str = START, block_ms: int = 0, count: int = 256
    ) -> list[Event]:
        last_seen = read_event_id(after)
        with self._lock:
            events = self._events(request_id, last_seen, count)
            if not events and block_ms > 0:
                self._wait(
                    self._readers,
                    request_id,
                    lambda: self._events(request_id, last_seen, 1),
                    block_ms / 1000,
                )
                events = self._events(request_id, last_seen, count)
            return events

    def events_of(
        self, after: Mapping[str, str], block_ms: int = 0, count: int = 256
    ) -> dict[str, list[Event]]:
        last_seen = {request_id: read_event_id(text) for request_id, text in after.items()}
        with self._lock:
            found = self._events_of(last_seen, count)
            if not found and last_seen and block_ms > 0:
                self._followers.num_waiting += 1
                try:
                    self._followers.woken.wait_for(
                        lambda: self._events_of(last_seen, 1), block_ms / 1000
                    )
                finally:
                    self._followers.num_waiting -= 1
                found = self._events_of(last_seen, count)
            return found

    def states(self, request_ids: Iterable[str]) -> dict[str, RequestState]:
        with self._lock:
            return {
                request_id: RequestState(
                    entry.epoch, entry.committed, entry.finish_reason, entry.error
                )
                for request_id in request_ids
                if (entry := self._entry(request_id)) is not None
            }

    def tokens(self, request_id: str) -> list[int]:
        with self._lock:
            entry = self._entry(request_id)
            return [] if entry is None else entry.generated.tolist()

    def pause(self, request_id: str, timeout_s: float) -> None:
        """Sleep so long, or until the request has ended; its tokens wake nobody here."""
        with self._lock:
            self._wait(self._pausing, request_id, lambda: self._has_ended(request_id), timeout_s)

    def now_unix_ms(self) -> int:
        return time.time_ns() // 1_000_000

    # All below expect the caller to hold the lock.

    def _entry(self, request_id: str) -> Entry | None:
        entry = self._entries.get(request_id)
        if entry is not None and entry.expires_at_s <= self._clock():
            del self._entries[request_id]
            return None
        return entry

    def _add(self, record: LedgerRecord, ttl_s: float) -> Entry:
        now_s = self._clock()
        if now_s >= self._sweep_at_s:
            self._sweep_at_s = now_s + SWEEP_EVERY_S
            self._entries = {k: e for k, e in self._entries.items() if e.expires_at_s > now_s}
        entry = self._entries[record.request_id] = Entry.of(record, expires_at_s=now_s + ttl_s)
        return entry

    def _add_ended(self, record: LedgerRecord, event_id: EventId) -> None:
        """A record that holds nothing but its end."""
        entry = self._add(record, self._finished_ttl_s)
        entry.final_id = event_id
        reason = record.finish_reason or FinishReason.ERROR
        entry.final = FinalEvent(
            event_text(event_id),
            reason,
            entry.error,
            0,
            0,
            error_code=record.error_code,
            error_param=record.error_param,
        )
        self._wake(record.request_id, is_end=True)

    def _end(self, entry: Entry, reason: FinishReason) -> None:
        entry.finish_reason = reason
        entry.final_id = (entry.committed, 1)
        entry.final = FinalEvent(
            event_text(entry.final_id),
            reason,
            entry.error,
            entry.num_prompt,
            len(entry.generated),
            entry.num_cached,
            entry.error_code,
        )
        entry.expires_at_s = self._clock() + self._finished_ttl_s

    def _events(self, request_id: str, after: EventId, count: int) -> list[Event]:
        entry = self._entry(request_id)
        return [] if entry is None else entry.events(after, count)

    def _events_of(self, after: Mapping[str, EventId], count: int) -> dict[str, list[Event]]:
        found = {i: self._events(i, last_seen, count) for i, last_seen in after.items()}
        return {request_id: events for request_id, events in found.items() if events}

    def _has_ended(self, request_id: str) -> bool:
        entry = self._entry(request_id)
        return entry is not None and entry.final is not None

    def _wait(
        self,
        waiting: dict[str, _Readers],
        request_id: str,
        come: Callable[[], object],
        timeout_s: float,
    ) -> None:
        """Until `come()` says so; lets go of the lock meanwhile."""
        readers = waiting.get(request_id)
        if readers is None:
            readers = waiting[request_id] = _Readers(threading.Condition(self._lock))
        readers.num_waiting += 1
        try:
            readers.woken.wait_for(come, timeout_s)
        finally:
            readers.num_waiting -= 1
            if not readers.num_waiting:
                del waiting[request_id]

    def _wake(self, request_id: str, *, is_end: bool = False) -> None:
        if readers := self._readers.get(request_id):
            readers.woken.notify_all()
        if is_end and (pausing := self._pausing.get(request_id)):
            pausing.woken.notify_all()
        if self._followers.num_waiting:
            self._followers.woken.notify_all()


@dataclass(slots=True, eq=False)
class _Readers:
    """Those who wait for an event of one request; they need not know it yet."""

    woken: threading.Condition
    num_waiting: int = 0
