"""The fields of a `token.v1`, and of log probabilities. Knows no frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.codec_fields import as_float, as_int, take_int, take_list, take_text
from shared.errors import DecodeError
from shared.logprobs import MAX_TOP_LOGPROBS, TokenLogprobs
from shared.messages import MAX_TOKEN_ID, Token

_MAX_FLOAT32 = (2.0 - 2.0**-23) * 2.0**127


def token_fields(token: Token) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "kind": "token.v1",
        "request_id": token.request_id,
        "index": token.index,
        "token_id": token.token_id,
        "text": token.text,
    }
    if token.logprobs is not None:
        fields["logprobs"] = logprobs_fields(token.logprobs)
    return fields


def read_token(raw: Mapping[str, Any]) -> Token:
    """Raises `DecodeError` naming the field."""
    return Token(
        request_id=take_text(raw, "request_id"),
        index=take_int(raw, "index"),
        token_id=take_int(raw, "token_id", high=MAX_TOKEN_ID),
        text=take_text(raw, "text"),
        logprobs=_read_logprobs(raw["logprobs"]) if raw.get("logprobs") is not None else None,
    )


def logprobs_fields(logprobs: TokenLogprobs) -> dict[str, Any]:
    return {
        "logprob": logprobs.logprob,
        "top": [[token_id, logprob] for token_id, logprob in logprobs.top],
    }


def read_all_logprobs(raw: Mapping[str, Any], num_tokens: int) -> tuple[TokenLogprobs, ...] | None:
    """Those of each token of a reply, if it has them."""
    if raw.get("logprobs") is None:
        return None
    found = tuple(map(_read_logprobs, take_list(raw, "logprobs")))
    if len(found) != num_tokens:
        raise DecodeError(f"logprobs must be those of {num_tokens} tokens, got {len(found)}")
    return found


def _read_logprobs(raw: Any) -> TokenLogprobs:
    if type(raw) is not dict:
        raise DecodeError(f"logprobs must be a map, got {type(raw).__name__}")
    top = take_list(raw, "top")
    if len(top) > MAX_TOP_LOGPROBS:
        raise DecodeError(f"top must be at most {MAX_TOP_LOGPROBS} tokens, got {len(top)}")
    return TokenLogprobs.of(_number("logprob", raw.get("logprob")), tuple(map(_read_top, top)))


def _read_top(pair: Any) -> tuple[int, float]:
    if type(pair) is not list or len(pair) != 2:
        raise DecodeError(f"top must hold pairs of token id and logprob, got {pair!r:.80}")
    return as_int("top", pair[0], high=MAX_TOKEN_ID), _number("top", pair[1])


def _number(name: str, value: Any) -> float:
    number = as_float(name, value)
    if not abs(number) <= _MAX_FLOAT32:  # NaN is neither
        raise DecodeError(f"{name} must be a finite number of binary32, got {number!r}")
    return number
