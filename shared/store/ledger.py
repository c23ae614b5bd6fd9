"""The record of every request: what was asked, which tokens are committed, how it ended.

Owns the rule that a position is committed once, by whoever comes first, and that a request ends
with exactly one final event. A step may commit several positions: together, or not at all.
Everything may be repeated: a second call finds what the first did.
A record that cannot be read is `StoreDamaged`: its request can only be buried.
Knows no queue and no model. Longer than other modules: all that is done to a record is told here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shared.errors import DecodeError, ErrorCode, StoreDamaged
from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason
from shared.store import keys
from shared.store.connection import Call, Connection, Stores
from shared.store.ledger_base import MAX_ERROR_CHARS, START, read_event_id
from shared.store.ledger_fields import (
    flat_fields,
    pairs,
    read_event,
    read_reason,
    read_record,
    read_state,
)
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
    TokenEvent,
    Unknown,
)
from shared.store.scripts import load_script

_STATE_FIELDS = ("epoch", "committed", "finish_reason", "error")


class Ledger:
    """Requests by id. Raises `StoreUnavailable` when the store does not answer or refuses.

    Records live `running_ttl_s` after their last sign of life, and `finished_ttl_s` after the end.
    """

    def __init__(
        self, meta: Connection, *, running_ttl_s: float = 86_400, finished_ttl_s: float = 3_600
    ) -> None:
        self._meta = meta
        self._running_ttl_ms = round(running_ttl_s * 1000)
        self._finished_ttl_ms = round(finished_ttl_s * 1000)

    @classmethod
    def of(cls, stores: Stores) -> Ledger:
        """The ledger of a cluster."""
        return cls(stores.meta, finished_ttl_s=stores.keep_answers_s)

    def admit(self, record: LedgerRecord) -> bool:
        """Write a new record. False when the request has one, which is then to be adopted.

        Raises `StoreDamaged` when it has events and no record: it ran before, and its readers have
        seen tokens that may not come again.
        """
        reply = self._meta.run(
            Call(
                load_script("ledger_admit"),
                (keys.ledger(record.request_id), keys.events(record.request_id)),
                (self._running_ttl_ms, *flat_fields(record)),
            )
        )
        if reply < 0:
            raise StoreDamaged(f"the store has lost the record of request {record.request_id}")
        return bool(reply)

    def refuse(self, record: LedgerRecord) -> bool:
        """End a request that was never admitted as the record says, so that whoever waits hears.

        False when the request is known already.
        """
        return bool(
            self._meta.run(
                Call(
                    load_script("ledger_refuse"),
                    (keys.ledger(record.request_id), keys.events(record.request_id)),
                    (
                        record.finish_reason or FinishReason.ERROR,
                        record.error[:MAX_ERROR_CHARS],
                        self._finished_ttl_ms,
                        record.error_code,
                        record.error_param,
                        *flat_fields(record),
                    ),
                )
            )
        )

    def bury(self, record: LedgerRecord) -> None:
        """End a request whose record or events were lost or damaged, with `record.error`.

        Whatever is left of them is replaced. The final event comes after every position, so that
        a reader who has seen tokens sees it too.
        """
        self._meta.run(
            Call(
                load_script("ledger_bury"),
                (keys.ledger(record.request_id), keys.events(record.request_id)),
                (
                    record.error[:MAX_ERROR_CHARS],
                    self._finished_ttl_ms,
                    record.error_code,
                    *flat_fields(record),
                ),
            )
        )

    def get(self, request_id: str) -> LedgerRecord | None:
        """The record, or None. Raises `DecodeError` for one that cannot be read."""
        flat = self._meta.run(("HGETALL", keys.ledger(request_id)))
        if not flat:
            return None
        return read_record(request_id, pairs(flat))

    def commit(
        self,
        request_id: str,
        epoch: int,
        position: int,
        token_ids: Sequence[int],
        finish: FinishReason | None = None,
        logprobs: Sequence[TokenLogprobs] = (),
    ) -> CommitResult:
        """Commit the tokens of the positions from `position` on, all or none of them.

        The request ends with the last when `finish` says so. The event of each and the final event
        are stored by the same script. Raises `StoreDamaged`.
        """
        commit = Commit(request_id, epoch, position, token_ids, finish, logprobs)
        result = self.start_commits([commit])()[0]
        if isinstance(result, StoreDamaged):
            raise result
        return result

    def start_commits(
        self, commits: Sequence[Commit]
    ) -> Callable[[], list[CommitResult | StoreDamaged]]:
        """Send commits. What is returned waits for what became of each, and is called once.

        All are one round trip; damage is that of one request alone.
        """
        wait = self._meta.start_all(
            [
                Call(
                    load_script("ledger_commit"),
                    (keys.ledger(commit.request_id), keys.events(commit.request_id)),
                    (
                        commit.epoch,
                        commit.position,
                        commit.finish or "",
                        self._running_ttl_ms,
                        self._finished_ttl_ms,
                        len(commit.token_ids),
                        *commit.token_ids,
                        *(logprobs.packed for logprobs in commit.logprobs),
                    ),
                )
                for commit in commits
            ],
            keep=(StoreDamaged,),
        )
        return lambda: [
            reply if isinstance(reply, StoreDamaged) else _commit_result(reply) for reply in wait()
        ]

    def finish(
        self, request_id: str, reason: FinishReason, error: str = "", code: str = ""
    ) -> bool:
        """End a request that still runs, with an `ErrorCode` beside an error.

        False when it has ended before, or is not known.
        """
        return bool(
            self._meta.run(
                Call(
                    load_script("ledger_finish"),
                    (keys.ledger(request_id), keys.events(request_id)),
                    (str(reason), error[:MAX_ERROR_CHARS], self._finished_ttl_ms, code),
                )
            )
        )

    def note_cached(self, request_id: str, num_cached: int) -> None:
        """Note how many positions of a prompt were there when it was started."""
        self._meta.run(
            Call(load_script("ledger_cached"), (keys.ledger(request_id),), (num_cached,))
        )

    def advance_epoch(self, request_id: str, expected: int, new: int) -> int | None:
        """Fence off what still runs at epoch `expected`. Returns the epoch the request has now.

        Anything but `new` means that it has moved on or ended; None that it is not known.
        """
        reply = self._meta.run(
            Call(
                load_script("ledger_epoch"),
                (keys.ledger(request_id),),
                (expected, new, self._running_ttl_ms),
            )
        )
        return None if reply is None else int(reply)

    def events(
        self, request_id: str, after: str = START, block_ms: int = 0, count: int = 256
    ) -> list[Event]:
        """Up to `count` events that come after the event `after`, the oldest first.

        Waits up to `block_ms` for the first one, 0 not at all; the wait is cut to half of the
        connection's timeout. Raises `RequestError` for a malformed `after`.
        """
        read_event_id(after)  # Redis would take "$" and others too
        block_ms = min(block_ms, int(self._meta.timeout_s * 500))
        waiting = ("BLOCK", block_ms) if block_ms > 0 else ()
        reply = self._meta.run(
            ("XREAD", "COUNT", count, *waiting, "STREAMS", keys.events(request_id), after)
        )
        return [read_event(entry) for entry in reply[0][1]] if reply else []

    def events_of(
        self, after: Mapping[str, str], block_ms: int = 0, count: int = 256
    ) -> dict[str, list[Event]]:
        """What came of several requests after the event of each: {request id: its events}.

        One round trip, and one wait for whichever comes first; else as `events`. A request whose
        events cannot be read has ended with an error: the others are not held up.
        """
        for event_id in after.values():
            read_event_id(event_id)
        if not after:
            return {}
        block_ms = min(block_ms, int(self._meta.timeout_s * 500))
        waiting = ("BLOCK", block_ms) if block_ms > 0 else ()
        streams = map(keys.events, after)
        try:
            reply = self._meta.run(
                ("XREAD", "COUNT", count, *waiting, "STREAMS", *streams, *after.values())
            )
        except StoreDamaged:  # one of the keys is no stream: find out which
            replies = self._meta.run_all(
                [("XREAD", "COUNT", count, "STREAMS", keys.events(i), a) for i, a in after.items()],
                keep=(StoreDamaged,),
            )
            return {
                i: [_damage(str(r))] if isinstance(r, StoreDamaged) else _events(r[0][1])
                for i, r in zip(after, replies, strict=True)
                if r
            }
        return {keys.request_id_of(key.decode()): _events(entries) for key, entries in reply or ()}

    def states(self, request_ids: Iterable[str]) -> dict[str, RequestState]:
        """The states of those requests that are known, in one round trip.

        One whose record is damaged has ended with an error: it cannot go on.
        """
        ids = list(request_ids)
        replies = self._meta.run_all(
            [("HMGET", keys.ledger(i), *_STATE_FIELDS) for i in ids], keep=(StoreDamaged,)
        )
        return {
            request_id: read_state(request_id, reply)
            for request_id, reply in zip(ids, replies, strict=True)
            if reply != [None] * len(_STATE_FIELDS)
        }

    def tokens(self, request_id: str) -> list[int]:
        """The token ids generated so far; empty for a request that is not known.

        Raises `DecodeError` for events that cannot be read.
        """
        entries = self._meta.run(("XRANGE", keys.events(request_id), "-", "+"))
        return [e.token_id for e in map(read_event, entries) if isinstance(e, TokenEvent)]

    def now_unix_ms(self) -> int:
        """The time of day where the ledger is: the same for all who share it."""
        seconds, micros = self._meta.run(("TIME",))
        return int(seconds) * 1000 + int(micros) // 1000


def _commit_result(reply: list[bytes]) -> CommitResult | StoreDamaged:
    try:
        return _read_commit(reply)
    except StoreDamaged as error:
        return error


def _read_commit(reply: list[bytes]) -> CommitResult:
    match reply:
        case [b"committed"]:
            return Committed()
        case [b"already", reason, *won]:
            return AlreadyCommitted(tuple(map(int, won)), read_reason(reason))
        case [b"damaged"]:
            raise StoreDamaged("the events of the request were lost")
        case [b"stale"]:
            return Stale()
        case [b"gap", committed]:
            return Gap(int(committed))
        case [b"fenced", current]:
            return Fenced(int(current))
        case [b"finished", reason]:
            return Finished(read_reason(reason) or FinishReason.ERROR)
        case [b"unknown"]:
            return Unknown()
        case _:
            raise AssertionError(f"ledger_commit.lua answered {reply!r}")


def _events(entries: Sequence[Any]) -> list[Event]:
    try:
        return [read_event(entry) for entry in entries]
    except DecodeError as error:
        return [_damage(str(error))]


def _damage(error: str) -> FinalEvent:
    return FinalEvent(START, FinishReason.ERROR, error, 0, 0, error_code=ErrorCode.LOST)
