"""Text to token ids and back. Knows no file format; the algorithm is Hugging Face `tokenizers`'.

The tokenizer travels as a `tokenizer.json` document that is written here, not by the library, so
that its bytes (and with them the model's digest) do not change with the library's version.
Format: https://github.com/huggingface/tokenizers (models/bpe, `Tokenizer.from_str`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

from shared.errors import ModelError, RequestError
from shared.text.guard import Guard
from shared.text.token_bytes import token_table
from shared.text.vocabulary import TokenType, Vocabulary

DAMAGED_REMEDY = "the model file is damaged or its converter failed; fetch another"
_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)

# Pre-tokenizers by GGUF name, as `tokenizer.json` spells them. Only what was compared with the
# original tokenizer is here: a wrong split gives wrong ids without any other sign.
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}


class Tokenizer:
    """A tokenizer of one model. Immutable, so that threads may share it."""

    def __init__(self, document: dict[str, Any]) -> None:
        """`document` is what `to_json` holds; raises `ModelError` for anything else."""
        try:
            self._document = document
            self._tokenizer = HfTokenizer.from_str(json.dumps(document["tokenizer"]))
            self.add_bos = bool(document["add_bos"])
            self.bos_token_id: int | None = document["bos_token_id"]
            self.eos_token_id: int | None = document["eos_token_id"]
            model, added = document["tokenizer"]["model"], document["tokenizer"]["added_tokens"]
            table = self.token_table = token_table(model["vocab"], added)
            self._token_bytes, self._special_ids = table.tokens, table.special_ids
        except Exception as error:
            raise ModelError(
                f"the tokenizer cannot be read: {error!s:.200}", remedy=DAMAGED_REMEDY
            ) from error

    @classmethod
    def from_vocabulary(cls, vocabulary: Vocabulary) -> Tokenizer:
        """Build from a model file's vocabulary.

        Raises `ModelError` for a tokenizer model or pre-tokenizer that is not supported, and for
        merges that do not fit the tokens.
        """
        return cls(
            {
                "tokenizer": _tokenizer_json(vocabulary),
                "add_bos": vocabulary.add_bos,
                "bos_token_id": vocabulary.bos_token_id,
                "eos_token_id": vocabulary.eos_token_id,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Tokenizer:
        """Build from what `to_json` wrote; raises `ModelError` for anything else."""
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ModelError(f"the tokenizer is no JSON: {error}") from error
        return cls(document)

    def to_json(self) -> str:
        """The tokenizer as JSON: equal tokenizers give equal text."""
        return json.dumps(self._document, separators=(",", ":"), ensure_ascii=False)

    @property
    def vocab_size(self) -> int:
        return len(self._token_bytes)

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token: a text of n characters has at least n / this many."""
        return max(1, *map(len, self._token_bytes))

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids of control tokens, which text output leaves out."""
        return self._special_ids

    @cached_property
    def guard(self) -> Guard:
        """Tells the names of control tokens in what users wrote from those of templates."""
        return Guard(self.token_text(token_id) for token_id in sorted(self._special_ids))

    def encode(self, text: str, *, parse_special: bool, add_bos: bool = False) -> list[int]:
        """Token ids of a text.

        With `parse_special` false, the names of control tokens in the text are ordinary
        characters: use it for what a user wrote. `add_bos` puts the beginning-of-sequence token
        first if the model wants one and the text does not begin with it. Raises `RequestError` for
        text that is not valid Unicode (lone surrogates).
        """
        tokenizer = self._tokenizer if parse_special else self._plain_tokenizer
        try:
            ids = list(tokenizer.encode(text, add_special_tokens=False).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text holds a lone surrogate and is no valid Unicode") from error
        if add_bos and self.add_bos and self.bos_token_id is not None:
            ids = ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD. Raises `RequestError` for an
        id outside the vocabulary."""
        parts = (self.token_bytes(i, skip_special=skip_special) for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special: bool = True) -> bytes:
        """The bytes that a token stands for: b"" for a control token that is skipped."""
        if not 0 <= token_id < len(self._token_bytes):
            raise RequestError(
                f"token id {token_id} is outside the vocabulary of {len(self._token_bytes)}"
            )
        if skip_special and token_id in self._special_ids:
            return b""
        return self._token_bytes[token_id]

    def token_text(self, token_id: int | None) -> str:
        """A token's own text, control tokens included; "" for None. For chat templates."""
        if token_id is None:
            return ""
        return self.token_bytes(token_id, skip_special=False).decode("utf-8", errors="replace")

    @cached_property
    def _plain_tokenizer(self) -> HfTokenizer:
        # A second instance: the library's switch for this is mutable state that threads would share
        document = self._document["tokenizer"]
        added = [token for token in document["added_tokens"] if not token["special"]]
        return HfTokenizer.from_str(json.dumps({**document, "added_tokens": added}))


def _tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    if vocabulary.model != "gpt2":
        raise ModelError(
            f"tokenizer model {vocabulary.model!r:.40} is not supported; supported: gpt2",
            remedy="give a model with a byte-level BPE tokenizer",
        )
    pre_tokenizer = _PRE_TOKENIZERS.get(vocabulary.pre)
    if pre_tokenizer is None:
        raise ModelError(
            f"pre-tokenizer {vocabulary.pre!r:.40} is not supported; "
            f"supported: {', '.join(_PRE_TOKENIZERS)}",
            remedy="give a model whose tokenizer is supported",
        )
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(vocab) != len(vocabulary.tokens):
        raise ModelError(
            f"the vocabulary names {len(vocabulary.tokens) - len(vocab)} tokens twice",
            remedy=DAMAGED_REMEDY,
        )
    added = [
        _added_token(i, vocabulary.tokens[i], special=kind in _SPECIAL_TYPES)
        for i, kind in enumerate(vocabulary.token_types)
        if kind in (*_SPECIAL_TYPES, TokenType.USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [_merge(text) for text in vocabulary.merges],
        },
    }


def _merge(text: str) -> list[str]:
    left, space, right = text.partition(" ")
    if not (left and space and right) or " " in right:
        raise ModelError(f"tokenizer merge {text!r:.60} is no pair", remedy=DAMAGED_REMEDY)
    return [left, right]


def _added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }
