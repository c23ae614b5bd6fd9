"""What every token of a vocabulary stands for, in bytes. Knows no tokenizer library.

A worker that constrains answers needs this table alone; a whole tokenizer would cost it 40 MB more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class TokenTable:
    """`tokens[i]` are the bytes of token i; the special ones are control tokens, never text."""

    tokens: list[bytes]
    special_ids: frozenset[int]


def read_token_table(raw: bytes) -> TokenTable:
    """The table of a tokenizer shard. Raises `ModelError` for one that cannot be read.

    Only the two parts that it needs are parsed: the merges are most of a shard, and would lie in
    memory as a hundred thousand texts.
    """
    try:
        text = raw.decode()
        return token_table(_part(text, "vocab"), _part(text, "added_tokens"))
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"the tokenizer shard cannot be read: {error!s:.200}") from error


def token_table(vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]]) -> TokenTable:
    """The bytes of every token by id, from a `tokenizer.json`'s vocabulary and added tokens."""
    tokens: list[bytes] = [b""] * len(vocab)
    for text, token_id in vocab.items():
        tokens[token_id] = _undo_byte_level(text)
    for token in added:
        tokens[token["id"]] = str(token["content"]).encode()
    return TokenTable(tokens, frozenset(token["id"] for token in added if token["special"]))


def _part(text: str, name: str) -> Any:
    # Inside of a text the quotes of such a name would be escaped.
    key = f'"{name}":'
    return json.JSONDecoder().raw_decode(text, text.index(key) + len(key))[0]


def _undo_byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in text)
    except KeyError:
        return text.encode()  # not written in the byte alphabet: it stands for itself


def _byte_alphabet(visible: Iterable[range]) -> dict[str, int]:
    """GPT-2's alphabet: a visible Latin-1 character is its own byte, the other bytes follow in
    order from U+0100 on."""
    own = [byte for part in visible for byte in part]
    others = [byte for byte in range(256) if byte not in set(own)]
    return {chr(byte): byte for byte in own} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet((range(0x21, 0x7F), range(0xA1, 0xAD), range(0xAE, 0x100)))
