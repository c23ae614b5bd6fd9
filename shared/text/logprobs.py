"""Log probabilities as OpenAI's API writes them. Pure.

https://platform.openai.com/docs/api-reference/chat/object and /completions/object
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.logprobs import TokenLogprobs
from shared.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text was shown, which begins at character `offset` of its answer."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs


def chat_logprobs(tokens: Sequence[ShownToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of a choice of a chat completion."""
    return {"content": [chat_entry(token, tokenizer) for token in tokens], "refusal": None}


def chat_entry(token: ShownToken, tokenizer: Tokenizer) -> dict[str, Any]:
    """What they say of one token."""
    return {
        **_entry(token.token_id, token.logprobs.logprob, tokenizer),
        "top_logprobs": [_entry(i, logprob, tokenizer) for i, logprob in token.logprobs.top],
    }


def text_logprobs(
    tokens: Sequence[ShownToken], tokenizer: Tokenizer, *, num_top: int
) -> dict[str, Any]:
    """The `logprobs` of a choice of a text completion that asked for the `num_top` likeliest.

    With those there is the token that was drawn, if it is none of them.
    """
    top: list[dict[str, float]] = []
    for token in tokens:
        found: dict[str, float] = {}
        for i, logprob in (*token.logprobs.top, (token.token_id, token.logprobs.logprob)):
            found.setdefault(token_text(i, tokenizer), shortest(logprob))
        top.append(found)
    return {
        "tokens": [token_text(token.token_id, tokenizer) for token in tokens],
        "token_logprobs": [shortest(token.logprobs.logprob) for token in tokens],
        "top_logprobs": top if num_top else None,
        "text_offset": [token.offset for token in tokens],
    }


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's own text, control tokens included; what is no UTF-8 as OpenAI writes it:
    `bytes:\\xf0\\x9f`."""
    raw = tokenizer.token_bytes(token_id, skip_special=False)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def shortest(logprob: float) -> float:
    """The decimal number with the fewest digits that is this one in binary32."""
    for digits in range(6, 10):
        text = f"{logprob:.{digits}g}"
        if _binary32(float(text)) == logprob:
            return float(text)
    return logprob


def _binary32(value: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "token": token_text(token_id, tokenizer),
        "logprob": shortest(logprob),
        "bytes": list(tokenizer.token_bytes(token_id, skip_special=False)),
    }
