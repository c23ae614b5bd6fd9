"""The record of every request: what was asked, which tokens are committed, how it ended.

Owns the rule that a position is committed once, by whoever comes first, and that a request ends
with exactly one final event. Everything may be repeated: a second call finds what the first did.
A record that cannot be read is `StoreDamaged`: its request can only be buried.
Knows no queue and no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from shared.errors import CellpipeError, DecodeError, RequestError, StoreDamaged
from shared.messages import FinishReason, SamplingParams
from shared.store import keys
from shared.store.connection import Argument, Call, Connection
from shared.store.ledger_types import (
    AlreadyCommitted,
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

START = "0-0"  # before the first event
_EVENT_ID = re.compile(r"\d{1,19}-\d{1,19}\Z", re.ASCII)
_MAX_ERROR_CHARS = 2000
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

    def admit(self, record: LedgerRecord) -> bool:
        """Write a new record. False when the request has one, which is then to be adopted."""
        return bool(
            self._meta.run(
                Call(
                    load_script("ledger_admit"),
                    (keys.ledger(record.request_id),),
                    (self._running_ttl_ms, *_flat_fields(record)),
                )
            )
        )

    def refuse(self, record: LedgerRecord) -> bool:
        """End a request that was never admitted with `record.error`, so that whoever waits hears.

        False when the request is known already.
        """
        return bool(
            self._meta.run(
                Call(
                    load_script("ledger_refuse"),
                    (keys.ledger(record.request_id), keys.events(record.request_id)),
                    (
                        record.error[:_MAX_ERROR_CHARS],
                        self._finished_ttl_ms,
                        *_flat_fields(record),
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
                (record.error[:_MAX_ERROR_CHARS], self._finished_ttl_ms, *_flat_fields(record)),
            )
        )

    def get(self, request_id: str) -> LedgerRecord | None:
        """The record, or None. Raises `DecodeError` for one that cannot be read."""
        flat = self._meta.run(("HGETALL", keys.ledger(request_id)))
        if not flat:
            return None
        return _read_record(request_id, _pairs(flat))

    def commit(
        self,
        request_id: str,
        epoch: int,
        position: int,
        token_id: int,
        finish: FinishReason | None = None,
    ) -> CommitResult:
        """Commit the token of a position, and the end of the request with it when `finish` says so.

        The token's event and the final event are stored by the same script. Raises `StoreDamaged`.
        """
        reply = self._meta.run(
            Call(
                load_script("ledger_commit"),
                (keys.ledger(request_id), keys.events(request_id)),
                (
                    epoch,
                    position,
                    token_id,
                    finish or "",
                    self._running_ttl_ms,
                    self._finished_ttl_ms,
                ),
            )
        )
        match reply:
            case [b"committed"]:
                return Committed()
            case [b"already", won, reason]:
                return AlreadyCommitted(int(won), _reason(reason))
            case [b"damaged"]:
                raise StoreDamaged(f"the events of request {request_id} were lost")
            case [b"stale"]:
                return Stale()
            case [b"gap", committed]:
                return Gap(int(committed))
            case [b"fenced", current]:
                return Fenced(int(current))
            case [b"finished", reason]:
                return Finished(_reason(reason) or FinishReason.ERROR)
            case [b"unknown"]:
                return Unknown()
            case _:
                raise AssertionError(f"ledger_commit.lua answered {reply!r}")

    def finish(self, request_id: str, reason: FinishReason, error: str = "") -> bool:
        """End a request that still runs. False when it has ended before, or is not known."""
        return bool(
            self._meta.run(
                Call(
                    load_script("ledger_finish"),
                    (keys.ledger(request_id), keys.events(request_id)),
                    (str(reason), error[:_MAX_ERROR_CHARS], self._finished_ttl_ms),
                )
            )
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
        if not _EVENT_ID.match(after):
            raise RequestError(f"event id must be <position>-<number>, got {after!r:.80}")
        block_ms = min(block_ms, int(self._meta.timeout_s * 500))
        waiting = ("BLOCK", block_ms) if block_ms > 0 else ()
        reply = self._meta.run(
            ("XREAD", "COUNT", count, *waiting, "STREAMS", keys.events(request_id), after)
        )
        return [_event(entry) for entry in reply[0][1]] if reply else []

    def states(self, request_ids: Iterable[str]) -> dict[str, RequestState]:
        """The states of those requests that are known, in one round trip.

        One whose record is damaged has ended with an error: it cannot go on.
        """
        ids = list(request_ids)
        replies = self._meta.run_all(
            [("HMGET", keys.ledger(i), *_STATE_FIELDS) for i in ids], keep=(StoreDamaged,)
        )
        return {
            request_id: _state(request_id, reply)
            for request_id, reply in zip(ids, replies, strict=True)
            if reply != [None] * len(_STATE_FIELDS)
        }

    def tokens(self, request_id: str) -> list[int]:
        """The token ids generated so far; empty for a request that is not known.

        Raises `DecodeError` for events that cannot be read.
        """
        entries = self._meta.run(("XRANGE", keys.events(request_id), "-", "+"))
        return [e.token_id for e in map(_event, entries) if isinstance(e, TokenEvent)]


def _flat_fields(record: LedgerRecord) -> list[Argument]:
    """A record as field, value, field, value: what `_read_record` reads."""
    fields: dict[str, Argument] = {
        "model_id": record.model_id,
        "layout_id": record.layout_id,
        "prompt": _pack_tokens(record.prompt_token_ids),
        "num_prompt": record.num_prompt_tokens,
        "sampling": json.dumps(asdict(record.sampling), separators=(",", ":")),
        "max_position": record.max_position,
        "stop": _pack_tokens(record.stop_token_ids),
        "epoch": record.epoch,
        "created_unix_ms": record.created_unix_ms,
        "deadline_unix_ms": record.deadline_unix_ms,
        "committed": record.num_prompt_tokens - 1,
        "finish_reason": record.finish_reason or "",
        "error": record.error[:_MAX_ERROR_CHARS],
    }
    return [part for field in fields.items() for part in field]


def _state(request_id: str, reply: Sequence[bytes | None] | StoreDamaged) -> RequestState:
    try:
        if isinstance(reply, StoreDamaged):
            raise reply
        epoch, committed, reason, error = (part or b"" for part in reply)
        return RequestState(int(epoch), int(committed), _reason(reason), _text(error))
    except (ValueError, StoreDamaged) as error:
        text = f"the ledger of request {request_id} cannot be read: {error}"
        return RequestState(0, -1, FinishReason.ERROR, text)


def _event(entry: Sequence[Any]) -> Event:
    event_id, flat = entry[0].decode(), entry[1]
    try:
        fields = _pairs(flat)
        if "t" in fields:
            return TokenEvent(event_id, int(event_id.partition("-")[0]), int(fields["t"]))
        return FinalEvent(
            event_id,
            FinishReason(_text(fields["reason"])),
            _text(fields["error"]),
            int(fields["num_prompt"]),
            int(fields["num_generated"]),
        )
    except (KeyError, ValueError) as error:
        raise DecodeError(f"event {event_id} of a request cannot be read: {error}") from error


def _read_record(request_id: str, fields: Mapping[str, bytes]) -> LedgerRecord:
    try:
        return LedgerRecord(
            request_id=request_id,
            model_id=_text(fields["model_id"]),
            layout_id=_text(fields["layout_id"]),
            prompt_token_ids=_unpack_tokens(fields["prompt"]),
            sampling=SamplingParams(**json.loads(fields["sampling"])),
            max_position=int(fields["max_position"]),
            stop_token_ids=_unpack_tokens(fields["stop"]),
            epoch=int(fields["epoch"]),
            created_unix_ms=int(fields["created_unix_ms"]),
            deadline_unix_ms=int(fields["deadline_unix_ms"]),
            committed_position=int(fields["committed"]),
            finish_reason=_reason(fields["finish_reason"]),
            error=_text(fields["error"]),
        )
    except (KeyError, ValueError, TypeError, CellpipeError) as error:
        raise DecodeError(f"the ledger of request {request_id} cannot be read: {error}") from error


def _pairs(flat: Sequence[bytes]) -> dict[str, bytes]:
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, "<i4").tobytes()


def _unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, "<i4").tolist())


def _reason(raw: bytes) -> FinishReason | None:
    try:
        return FinishReason(raw.decode()) if raw else None
    except ValueError as error:
        raise StoreDamaged(f"a ledger holds the finish reason {raw!r:.40}") from error


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
