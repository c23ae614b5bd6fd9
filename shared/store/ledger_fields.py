"""A request's record and events as Redis holds them: fields of a hash, entries of a stream.

Knows no key and no connection. What cannot be read is damaged, and raises by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from shared.errors import CellpipeError, DecodeError, StoreDamaged
from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason, SamplingParams
from shared.store.connection import Argument
from shared.store.ledger_base import MAX_ERROR_CHARS
from shared.store.ledger_types import Event, FinalEvent, LedgerRecord, RequestState, TokenEvent
from shared.text.response_format import read_response_format

_DEFAULTS = asdict(SamplingParams())
_RARE = (
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
)


def flat_fields(record: LedgerRecord) -> list[Argument]:
    """A record as field, value, field, value: what `_read_record` reads."""
    fields: dict[str, Argument] = {
        "model_id": record.model_id,
        "layout_id": record.layout_id,
        "prompt": _pack_tokens(record.prompt_token_ids),
        "num_prompt": record.num_prompt_tokens,
        "sampling": _pack_sampling(record.sampling),
        "max_position": record.max_position,
        "stop": _pack_tokens(record.stop_token_ids),
        "epoch": record.epoch,
        "created_unix_ms": record.created_unix_ms,
        "deadline_unix_ms": record.deadline_unix_ms,
        "committed": record.num_prompt_tokens - 1,
        "finish_reason": record.finish_reason or "",
        "error": record.error[:MAX_ERROR_CHARS],
        "num_cached": record.num_cached,
        "error_code": record.error_code,
        "error_param": record.error_param,
        "content": record.content,
    }
    if record.response_format is not None:
        document = record.response_format.document()
        fields["response_format"] = json.dumps(document, ensure_ascii=False)
    return [part for field in fields.items() for part in field]


def read_state(request_id: str, reply: Sequence[bytes | None] | StoreDamaged) -> RequestState:
    """How far a request has come; one whose record is damaged has ended with an error."""
    try:
        if isinstance(reply, StoreDamaged):
            raise reply
        epoch, committed, reason, error = (part or b"" for part in reply)
        return RequestState(int(epoch), int(committed), read_reason(reason), _text(error))
    except (ValueError, StoreDamaged) as error:
        text = f"the ledger of request {request_id} cannot be read: {error}"
        return RequestState(0, -1, FinishReason.ERROR, text)


def read_event(entry: Sequence[Any]) -> Event:
    """A token or the end. Raises `DecodeError`."""
    event_id, flat = entry[0].decode(), entry[1]
    try:
        fields = pairs(flat)
        if "t" in fields:
            packed = fields.get("l")
            return TokenEvent(
                event_id,
                int(event_id.partition("-")[0]),
                int(fields["t"]),
                None if packed is None else TokenLogprobs(packed),
            )
        return FinalEvent(
            event_id,
            FinishReason(_text(fields["reason"])),
            _text(fields["error"]),
            int(fields["num_prompt"]),
            int(fields["num_generated"]),
            int(fields.get("num_cached", b"0")),
            _text(fields.get("code", b"")),
            _text(fields.get("param", b"")),
        )
    except (KeyError, ValueError) as error:
        raise DecodeError(f"event {event_id} of a request cannot be read: {error}") from error


def read_record(request_id: str, fields: Mapping[str, bytes]) -> LedgerRecord:
    """The record in a hash. Raises `DecodeError` for one that cannot be read."""
    try:
        return LedgerRecord(
            request_id=request_id,
            model_id=_text(fields["model_id"]),
            layout_id=_text(fields["layout_id"]),
            prompt_token_ids=_unpack_tokens(fields["prompt"]),
            sampling=_unpack_sampling(fields["sampling"]),
            max_position=int(fields["max_position"]),
            stop_token_ids=_unpack_tokens(fields["stop"]),
            epoch=int(fields["epoch"]),
            created_unix_ms=int(fields["created_unix_ms"]),
            deadline_unix_ms=int(fields["deadline_unix_ms"]),
            committed_position=int(fields["committed"]),
            finish_reason=read_reason(fields["finish_reason"]),
            error=_text(fields["error"]),
            num_cached=int(fields.get("num_cached", b"0")),
            error_code=_text(fields.get("error_code", b"")),
            error_param=_text(fields.get("error_param", b"")),
            response_format=read_response_format(json.loads(fields["response_format"]))
            if "response_format" in fields
            else None,
            content=_text(fields.get("content", b"")),
        )
    except (KeyError, ValueError, TypeError, CellpipeError) as error:
        raise DecodeError(f"the ledger of request {request_id} cannot be read: {error}") from error


def pairs(flat: Sequence[bytes]) -> dict[str, bytes]:
    """Field, value, field, value as a map."""
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}


def _pack_sampling(sampling: SamplingParams) -> str:
    """As JSON, without what most requests leave as it is."""
    fields = asdict(sampling)
    for name in _RARE:
        if fields[name] == _DEFAULTS[name]:
            del fields[name]
    return json.dumps(fields, separators=(",", ":"))


def _unpack_sampling(packed: bytes) -> SamplingParams:
    fields = json.loads(packed)
    if "logit_bias" in fields:
        fields["logit_bias"] = tuple((token_id, bias) for token_id, bias in fields["logit_bias"])
    return SamplingParams(**fields)


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    return np.array(token_ids, "<i4").tobytes()


def _unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(packed, "<i4").tolist())


def read_reason(raw: bytes) -> FinishReason | None:
    """None for one that still runs. Raises `StoreDamaged`."""
    try:
        return FinishReason(raw.decode()) if raw else None
    except ValueError as error:
        raise StoreDamaged(f"a ledger holds the finish reason {raw!r:.40}") from error


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
