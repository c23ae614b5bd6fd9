"""What a tokenizer is made from, as values. Knows no file format and no tokenizer library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


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
    """A vocabulary as GGUF files have it: token i is `tokens[i]`, of type `token_types[i]`.

    `model` and `pre` name the algorithm and its pre-tokenizer as GGUF does ("gpt2", "smollm").
    `merges` are pairs "left right" in order of rank, for "gpt2"; `scores[i]` tells how early token
    i is merged, for "llama" (the highest first). `add_space_prefix` puts a space before a text.
    `add_bos` says whether a raw prompt starts with `bos_token_id`.
    """

    model: str
    pre: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    bos_token_id: int | None
    eos_token_id: int | None
    add_bos: bool
    scores: tuple[float, ...] = ()
    add_space_prefix: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer that came as a `tokenizer.json` of Hugging Face's library, or was made into one.

    `document` is that JSON, unchecked. `vocab_size` are the rows of the embedding: ids from the
    tokenizer's last one up to there have no text. `add_bos` as in `Vocabulary`.
    """

    document: Mapping[str, Any]
    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    add_bos: bool


AnyVocabulary = Vocabulary | TokenizerFile
