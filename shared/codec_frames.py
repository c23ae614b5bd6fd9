"""Bytes to the map that a frame is, msgpack or JSON, within limits. Knows no kind of message."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import msgpack

from shared.errors import DecodeError
from shared.messages import MAX_LIST_LEN, REQUEST_ID_PATTERN

MSGPACK = "application/msgpack"
JSON = "application/json"
MAX_FRAME_BYTES = 8 << 20
_MAX_ARRAY_LEN = MAX_LIST_LEN  # an array element costs 8 bytes once read, a wire byte or more
_MAX_MAP_LEN = 1024  # a schema's definitions; a bias has 300 tokens


def request_id_of(body: bytes, content_type: str = MSGPACK) -> str:
    """The request id in a frame that `decode` refuses, to tell who waits for it; "" if none."""
    try:
        request_id = read_map(body, content_type)[1].get("request_id")
    except DecodeError:
        return ""
    if isinstance(request_id, str) and REQUEST_ID_PATTERN.match(request_id):
        return request_id
    return ""


def read_map(body: bytes, content_type: str) -> tuple[str, dict[str, Any]]:
    """The media type of a frame, and the map that it is."""
    media_type = content_type.partition(";")[0].strip().lower()
    if len(body) > MAX_FRAME_BYTES:
        raise DecodeError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    if media_type in (MSGPACK, ""):
        raw = _read_msgpack(body)
    elif media_type == JSON:
        raw = _read_json(body)
    else:
        raise DecodeError(f"content_type must be {MSGPACK} or {JSON}, got {content_type!r:.80}")
    if not isinstance(raw, dict):
        raise DecodeError(f"frame must be a map, got {type(raw).__name__}")
    return media_type, raw


def _refuse_ext(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"extension type {code} is not allowed")


def _read_msgpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            ext_hook=_refuse_ext,
            max_bin_len=MAX_FRAME_BYTES,
            max_str_len=MAX_FRAME_BYTES,
            max_array_len=_MAX_ARRAY_LEN,
            max_map_len=_MAX_MAP_LEN,
            max_ext_len=0,  # also refuses timestamps, which never reach the hook
        )
    # Everything msgpack raises for bad bytes is one of these: its own errors are ValueErrors, and
    # the pure Python version also lets a TypeError through for a key that cannot be hashed.
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise DecodeError(f"frame is not msgpack: {error!s:.200}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"request is not JSON: {error!s:.200}") from error
