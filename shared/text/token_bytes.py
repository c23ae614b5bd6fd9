"""What every token of a vocabulary stands for, in bytes. Knows no tokenizer library.

A worker that constrains answers needs this table alone; a whole tokenizer would cost it 40 MB more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from shared.errors import ModelError

SPACE_MARK = "\u2581"  # sentencepiece's sign for a space
_SPELLING = '{"spelling":'
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Spelling(StrEnum):
    """How the texts of a vocabulary are written."""

    BYTE_LEVEL = "byte_level"  # GPT-2's alphabet: a character for each byte
    SPACE_MARKS = "space_marks"  # as they are, but for spaces
    SPACE_MARKS_AND_BYTES = "space_marks_and_bytes"  # and <0x0A> stands for a byte


@dataclass(frozen=True, slots=True)
class TokenTable:
    """`tokens[i]` are the bytes of token i; the special ones are control tokens, never text."""

    tokens: list[bytes]
    special_ids: frozenset[int]


Vocab = Mapping[str, int] | Sequence[tuple[str, float]]


def read_token_table(raw: bytes) -> TokenTable:
    """The table of a tokenizer shard. Raises `ModelError` for one that cannot be read.

    Only the parts that it needs are parsed: the merges are most of a shard, and would lie in
    memory as a hundred thousand texts.
    """
    try:
        text = raw.decode()
        spelling = Spelling.BYTE_LEVEL
        if text.startswith(_SPELLING):
            spelling = Spelling(_value_at(text, len(_SPELLING)))
        return token_table(_part(text, "vocab"), _part(text, "added_tokens"), spelling)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"the tokenizer shard cannot be read: {error!s:.200}") from error


def token_table(
    vocab: Vocab,
    added: Sequence[Mapping[str, Any]],
    spelling: Spelling = Spelling.BYTE_LEVEL,
    *,
    vocab_size: int = 0,
) -> TokenTable:
    """The bytes of every token by id, from a `tokenizer.json`'s vocabulary and added tokens.

    `vocab` maps texts to ids, or lists (text, score) in the order of ids. There are at least
    `vocab_size` entries; those without a token are b"".
    """
    texts = list(_texts(vocab))
    ids = [token_id for _, token_id in texts] + [token["id"] for token in added]
    tokens: list[bytes] = [b""] * max([vocab_size, *(token_id + 1 for token_id in ids)])
    for text, token_id in texts:
        tokens[token_id] = _bytes_of(text, spelling)
    for token in added:
        content = str(token["content"])
        is_marked = spelling is not Spelling.BYTE_LEVEL and not token["special"]
        tokens[token["id"]] = _bytes_of(content, spelling) if is_marked else content.encode()
    return TokenTable(tokens, frozenset(token["id"] for token in added if token["special"]))


def spell_bytes(raw: bytes) -> str:
    """Bytes in GPT-2's alphabet."""
    return "".join(_CHAR_OF[byte] for byte in raw)


def _texts(vocab: Vocab) -> Iterator[tuple[str, int]]:
    if isinstance(vocab, Mapping):
        yield from vocab.items()
    else:
        yield from ((piece[0], i) for i, piece in enumerate(vocab))


def _bytes_of(text: str, spelling: Spelling) -> bytes:
    if spelling is Spelling.BYTE_LEVEL:
        return _undo_byte_level(text)
    if spelling is Spelling.SPACE_MARKS_AND_BYTES and (byte := _BYTE_TOKEN.fullmatch(text)):
        return bytes.fromhex(byte[1])
    return text.replace(SPACE_MARK, " ").encode()


def _part(text: str, name: str) -> Any:
    # Inside of a text the quotes of such a name would be escaped.
    key = f'"{name}":'
    return _value_at(text, text.index(key) + len(key))


def _value_at(text: str, start: int) -> Any:
    return json.JSONDecoder().raw_decode(text, start)[0]


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
_CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}
