"""The fields of a `token.v1`. Knows no frame."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.codec_fields import take_int, take_text
from shared.messages import MAX_TOKEN_ID, Token


def token_fields(token: Token) -> dict[str, Any]:
    return {
        "kind": "token.v1",
        "request_id": token.request_id,
        "index": token.index,
        "token_id": token.token_id,
        "text": token.text,
    }


def read_token(raw: Mapping[str, Any]) -> Token:
    """Raises `DecodeError` naming the field."""
    return Token(
        request_id=take_text(raw, "request_id"),
        index=take_int(raw, "index"),
        token_id=take_int(raw, "token_id", high=MAX_TOKEN_ID),
        text=take_text(raw, "text"),
    )
