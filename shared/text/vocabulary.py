"""What a tokenizer is made from, as values. Knows no file format and no tokenizer library."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class TokenType(IntEnum):
    """What a token of the vocabulary is (numbers as in GGUF's `tokenizer.ggml.token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A byte-pair vocabulary: token i is `tokens[i]`, of type `token_types[i]`.

    `model` and `pre` name the algorithm and its pre-tokenizer as GGUF does ("gpt2", "smollm").
    `merges` are pairs "left right" in order of rank. `add_bos` says whether a raw prompt starts
    with `bos_token_id`.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_token_id: int | None
    eos_token_id: int | None
    add_bos: bool
