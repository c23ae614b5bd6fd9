"""Turns messages into frames and frames into messages. Knows no queue, no store and no model.

A frame is one msgpack map with string keys: `kind`, then the fields of `shared.messages` under
their own names. Fields are only ever added, with defaults, so an unknown field is ignored and a
missing one that has a default takes it; of a repeated key the last one counts, as in JSON. A
`request.v1`, `reply.v1` and `token.v1` may also be JSON.

The wire is hostile: whatever the bytes, `decode` returns a valid message or raises `DecodeError`,
or `RequestError` for a well-formed request whose values cannot be served. Types are checked (a bool
is no int), sizes are checked against each other and against limits before anything is allocated
from them, the dtype table is closed, and there are no extension types. The numbers inside a tensor
are not judged here: the kernel refuses what is not finite.

Maps are read in `codec_frames`, their fields checked in `codec_fields`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from shared.codec_fields import (
    pack_tensors,
    take_bool,
    take_int,
    take_list,
    take_map,
    take_text,
    take_tokens,
    unpack_tensors,
)
from shared.codec_frames import JSON, MAX_FRAME_BYTES, MSGPACK, read_map, request_id_of
from shared.codec_sampling import read_sampling, sampling_fields
from shared.codec_tokens import logprobs_fields, read_all_logprobs, read_token, token_fields
from shared.errors import DecodeError, RequestError
from shared.messages import (
    ChatMessage,
    FinishReason,
    Message,
    Reply,
    Request,
    Step,
    Token,
)
from shared.text.response_format import read_response_format

__all__ = [
    "JSON",
    "MAX_FRAME_BYTES",
    "MSGPACK",
    "decode",
    "encode",
    "encode_json",
    "request_id_of",
]

_INT32, _INT64 = 2**31 - 1, 2**63 - 1

_packers = threading.local()  # a Packer keeps its buffer, which costs more to make than a step


def encode(message: Message) -> bytes:
    """The msgpack frame of a message. Raises `ValueError` for a tensor dtype that has no code."""
    try:
        pack: Callable[[Any], bytes] = _packers.pack
    except AttributeError:
        pack = _packers.pack = msgpack.Packer(use_bin_type=True).pack
    match message:
        case Step():
            return pack(_step_fields(message))
        case Request():
            return pack(_request_fields(message))
        case Reply():
            return pack(_reply_fields(message))
        case Token():
            return pack(token_fields(message))


def encode_json(message: Request | Reply | Token) -> bytes:
    """The message as UTF-8 JSON, for producers that speak no msgpack."""
    match message:
        case Request():
            fields = _request_fields(message)
        case Reply():
            fields = _reply_fields(message)
        case Token():
            fields = token_fields(message)
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def decode(body: bytes, content_type: str = MSGPACK) -> Message:
    """The message in a frame; tensors are read-only little-endian views of the frame's bytes.

    Raises `DecodeError` for anything that is not a valid message, and `RequestError` for a
    well-formed request that cannot be served; both are `PermanentError`. An empty `content_type`
    means msgpack.
    """
    media_type, raw = read_map(body, content_type)
    kind = raw.get("kind", "request.v1" if media_type == JSON else None)
    if not isinstance(kind, str) or kind not in _READERS:
        raise DecodeError(f"kind must be one of {', '.join(_READERS)}, got {kind!r:.80}")
    if media_type == JSON and kind not in _MAY_BE_JSON:
        raise DecodeError(f"only {', '.join(_MAY_BE_JSON)} may be JSON, got {kind}")
    return _READERS[kind](raw)


def _step_fields(step: Step) -> dict[str, Any]:
    fields = {
        "kind": "step.v1",
        "request_id": step.request_id,
        "model_id": step.model_id,
        "layout_id": step.layout_id,
        "group": step.group,
        "epoch": step.epoch,
        "position": step.position,
        "sample": step.sample,
        "max_position": step.max_position,
        "tensors": pack_tensors(step.tensors),
        "sampling": sampling_fields(step.sampling),
        "stop_token_ids": step.stop_token_ids,
        "deadline_unix_ms": step.deadline_unix_ms,
        "route": step.route,
    }
    if step.draft or step.accepted:
        # Another kind: whoever passed over these fields would take guesses for tokens.
        fields |= {"kind": "step.v2", "draft": step.draft, "accepted": step.accepted}
    if step.shaped or step.sampling.min_p or step.sampling.logprobs is not None:
        # Again: whoever passed over these would draw other tokens.
        fields |= {
            "kind": "step.v3",
            "draft": step.draft,
            "accepted": step.accepted,
            "shaped": step.shaped,
        }
    if step.is_batch:
        fields["is_batch"] = True
    return fields


def _read_step(raw: dict[str, Any]) -> Step:
    speculates = raw["kind"] != "step.v1"
    try:
        sampling = read_sampling(take_map(raw, "sampling"))
        stop_token_ids = take_tokens(raw, "stop_token_ids") if "stop_token_ids" in raw else ()
        draft = take_tokens(raw, "draft") if speculates else ()
        accepted = take_tokens(raw, "accepted") if speculates else ()
    except RequestError as error:  # a step is written by us: bad values make a bad frame
        raise DecodeError(f"step.v1 {error}") from error
    return Step(
        request_id=take_text(raw, "request_id"),
        model_id=take_text(raw, "model_id"),
        layout_id=take_text(raw, "layout_id"),
        group=take_int(raw, "group"),
        epoch=take_int(raw, "epoch"),
        position=take_int(raw, "position", high=_INT32),
        sample=take_bool(raw, "sample"),
        max_position=take_int(raw, "max_position", high=_INT32),
        tensors=unpack_tensors(take_map(raw, "tensors")),
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        deadline_unix_ms=take_int(raw, "deadline_unix_ms", 0),
        route=_read_route(raw) if "route" in raw else (),
        draft=draft,
        accepted=accepted,
        is_batch=take_bool(raw, "is_batch", False),
        shaped=take_bool(raw, "shaped", False) if raw["kind"] == "step.v3" else False,
    )


def _read_route(raw: Mapping[str, Any]) -> tuple[str, ...]:
    route = tuple(take_list(raw, "route"))
    if not all(isinstance(worker_id, str) for worker_id in route):
        raise DecodeError("step.v1 route must hold texts")
    return route


def _request_fields(request: Request) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": "request.v1",
        "request_id": request.request_id,
        "model": request.model,
        "sampling": sampling_fields(request.sampling),
        "deadline_unix_ms": request.deadline_unix_ms,
    }
    if request.prompt is not None:
        fields["prompt"] = request.prompt
    if request.messages is not None:
        fields["messages"] = [{"role": m.role, "content": m.content} for m in request.messages]
    if request.token_ids is not None:
        fields["token_ids"] = request.token_ids
    if request.stream:
        fields["stream"] = True
    if request.response_format is not None:
        fields["response_format"] = request.response_format.document()
    return fields


def _read_request(raw: dict[str, Any]) -> Request:
    messages = None if raw.get("messages") is None else _read_messages(raw)
    return Request(
        request_id=take_text(raw, "request_id"),
        prompt=None if raw.get("prompt") is None else take_text(raw, "prompt"),
        messages=messages,
        token_ids=None if raw.get("token_ids") is None else take_tokens(raw, "token_ids"),
        model=take_text(raw, "model", ""),
        sampling=read_sampling(take_map(raw, "sampling", {})),
        deadline_unix_ms=take_int(raw, "deadline_unix_ms", 0, low=-_INT64),
        stream=take_bool(raw, "stream", False),
        response_format=None
        if raw.get("response_format") is None
        else read_response_format(take_map(raw, "response_format")),
    )


def _read_messages(raw: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    turns = []
    for number, turn in enumerate(take_list(raw, "messages")):
        if not isinstance(turn, dict):
            raise DecodeError(f"messages[{number}] must be a map, got {type(turn).__name__}")
        turns.append(ChatMessage(take_text(turn, "role"), take_text(turn, "content")))
    return tuple(turns)


def _reply_fields(reply: Reply) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": "reply.v1",
        "request_id": reply.request_id,
        "finish_reason": str(reply.finish_reason),
        "text": reply.text,
        "token_ids": reply.token_ids,
        "num_prompt_tokens": reply.num_prompt_tokens,
        "error": reply.error,
        "num_cached_tokens": reply.num_cached_tokens,
    }
    if reply.error_code:
        fields |= {"error_code": reply.error_code, "error_param": reply.error_param}
    if reply.logprobs is not None:
        fields["logprobs"] = [logprobs_fields(each) for each in reply.logprobs]
    return fields


def _read_reply(raw: dict[str, Any]) -> Reply:
    reason = take_text(raw, "finish_reason")
    if reason not in _FINISH_REASONS:
        known = ", ".join(_FINISH_REASONS)
        raise DecodeError(f"finish_reason must be one of {known}, got {reason!r:.80}")
    try:
        token_ids = take_tokens(raw, "token_ids")
    except RequestError as error:
        raise DecodeError(f"reply.v1 {error}") from error
    return Reply(
        request_id=take_text(raw, "request_id"),
        finish_reason=_FINISH_REASONS[reason],
        text=take_text(raw, "text"),
        token_ids=token_ids,
        num_prompt_tokens=take_int(raw, "num_prompt_tokens"),
        error=take_text(raw, "error", ""),
        num_cached_tokens=take_int(raw, "num_cached_tokens", 0),
        error_code=take_text(raw, "error_code", ""),
        error_param=take_text(raw, "error_param", ""),
        logprobs=read_all_logprobs(raw, len(token_ids)),
    )


_FINISH_REASONS = {reason.value: reason for reason in FinishReason}
_READERS: dict[str, Callable[[dict[str, Any]], Message]] = {
    "step.v1": _read_step,
    "step.v2": _read_step,
    "step.v3": _read_step,
    "request.v1": _read_request,
    "reply.v1": _read_reply,
    "token.v1": read_token,
}
_MAY_BE_JSON = ("request.v1", "reply.v1", "token.v1")
