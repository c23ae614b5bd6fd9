"""A tiktoken file's ranks as a `tokenizer.json` document. Pure.

tiktoken merges, of all neighbours that together are a token, those whose token has the lowest rank:
so every pair that makes a token is a merge here, and a piece that is a token stays whole.
Format: https://github.com/openai/tiktoken/blob/main/tiktoken/load.py (a line each: base64, rank).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import ModelError
from shared.text.pre_tokenizers import KIMI, split_rules
from shared.text.token_bytes import spell_bytes
from shared.text.vocabulary_json import bpe_model, document_json

# By the class that `tokenizer_config.json` names: the expression is in its Python code alone.
PATTERNS = {"TikTokenTokenizer": KIMI}
MAX_TOKEN_BYTES = 1024


def read_ranks(raw: bytes) -> dict[bytes, int]:
    """Tokens and their ranks, which are their ids. Raises `ModelError` naming a line."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        if not line:
            continue
        try:
            text, rank = line.split()
            token = base64.b64decode(text, validate=True)
            ranks_before = len(ranks)
            ranks[token] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise _bad(f"line {number} is no token and rank: {line[:40]!r}") from error
        if len(ranks) == ranks_before:
            raise _bad(f"line {number} names the token {token[:40]!r} again")
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise _bad(f"line {number} has a token of {len(token)} bytes")
    missing = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if missing is not None:
        raise _bad(f"there is no token for the byte {missing}")
    return ranks


def tiktoken_json(
    ranks: Mapping[bytes, int], pattern: str, added_tokens: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The document of tokens by rank, the expression that splits a text, and added tokens."""
    merges: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        found = [(ranks[a], ranks[b], a, b) for a, b in pairs if a in ranks and b in ranks]
        merges += ([spell_bytes(a), spell_bytes(b)] for *_, a, b in sorted(found))
    vocab = {spell_bytes(token): rank for token, rank in ranks.items()}
    return document_json(
        bpe_model(vocab, merges, ignore_merges=True),
        list(added_tokens),
        pre_tokenizer=split_rules((pattern,)),
    )


def _bad(what: str) -> ModelError:
    return ModelError(
        f"the tiktoken file cannot be used: {what}", remedy="fetch the model's folder again"
    )
