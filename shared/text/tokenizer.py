"""Text to token ids and back. Knows no file format; the algorithm is Hugging Face `tokenizers`'.

The tokenizer travels as a `tokenizer.json` document: that of the model's folder, or one that is
made of a GGUF file's vocabulary or of a tiktoken file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any, assert_never

from tokenizers import Encoding
from tokenizers import Tokenizer as HfTokenizer

from shared.errors import ModelError, RequestError
from shared.text.guard import ControlName, Guard
from shared.text.token_bytes import Spelling, token_table
from shared.text.tokenizer_json import (
    checked_document,
    continued,
    spelling_of,
    strips_first_space,
    without_control,
)
from shared.text.vocabulary import AnyVocabulary, TokenizerFile, Vocabulary
from shared.text.vocabulary_json import DAMAGED_REMEDY, vocabulary_json


class Tokenizer:
    """A tokenizer of one model. Immutable, so that threads may share it."""

    def __init__(self, document: dict[str, Any]) -> None:
        """`document` is what `to_json` holds; raises `ModelError` for anything else."""
        try:
            self._document = document
            self._parts: dict[str, Any] = document["tokenizer"]
            self._tokenizer = _load(self._parts)
            self.add_bos = bool(document["add_bos"])
            self.bos_token_id: int | None = document["bos_token_id"]
            self.eos_token_id: int | None = document["eos_token_id"]
            added = self._parts["added_tokens"]
            table = self.token_table = token_table(
                self._parts["model"]["vocab"],
                added,
                Spelling(document.get("spelling", Spelling.BYTE_LEVEL)),
                vocab_size=document.get("vocab_size", 0),
            )
            self._token_bytes, self._special_ids = table.tokens, table.special_ids
            self._control_ids = table.special_ids - _unknown_ids(self._parts["model"])
            self._strips_first_space = strips_first_space(self._parts)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(
                f"the tokenizer cannot be read: {error!s:.200}", remedy=DAMAGED_REMEDY
            ) from error

    @classmethod
    def from_vocabulary(cls, vocabulary: AnyVocabulary) -> Tokenizer:
        """Build from a model file's vocabulary or tokenizer file.

        Raises `ModelError` for a tokenizer model or pre-tokenizer that is not supported, and for
        tokens, merges or ids that do not fit each other or the model.
        """
        match vocabulary:
            case Vocabulary():
                parts, spelling = vocabulary_json(vocabulary)
                vocab_size = len(vocabulary.tokens)
            case TokenizerFile():
                vocab_size = vocabulary.vocab_size
                parts = checked_document(vocabulary.document, vocab_size)
                spelling = spelling_of(parts)
            case _:
                assert_never(vocabulary)
        document = {
            "tokenizer": parts,
            "add_bos": vocabulary.add_bos,
            "bos_token_id": vocabulary.bos_token_id,
            "eos_token_id": vocabulary.eos_token_id,
        }
        if spelling is not Spelling.BYTE_LEVEL:
            document = {"spelling": spelling.value, **document}  # first: `read_token_table`
        if isinstance(vocabulary, TokenizerFile):
            document["vocab_size"] = vocab_size
        tokenizer = cls(document)
        tokenizer._check(vocab_size)
        return tokenizer

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
        return Guard(
            ControlName(token["content"], left=token["lstrip"], right=token["rstrip"])
            for token in self._parts["added_tokens"]
            if token["special"]
        )

    def encode(
        self, text: str, *, parse_special: bool, add_bos: bool = False, continues: bool = False
    ) -> list[int]:
        """Token ids of a text.

        With `parse_special` false, the names of control tokens in the text are ordinary
        characters: use it for what a user wrote. `add_bos` puts the beginning-of-sequence token
        first if the model wants one and the text does not begin with it. `continues` says that
        other tokens of the same prompt stand before. Raises `RequestError` for text that is not
        valid Unicode (lone surrogates).
        """
        if parse_special:
            ids = list(_encoded(self._whole(continues), text).ids)
        else:
            ids = self._plain_ids(text, continues)
        if add_bos and self.add_bos and self.bos_token_id is not None:
            ids = ids if ids[:1] == [self.bos_token_id] else [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True, whole: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        `whole` says that they begin a text, and not amid one as an answer does: the space is left
        out that some tokenizers put before a text. Raises `RequestError` for an id outside the
        vocabulary.
        """
        parts = (self.token_bytes(i, skip_special=skip_special) for i in ids)
        text = b"".join(parts).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if whole and self._strips_first_space else text

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

    def _plain_ids(self, text: str, continues: bool) -> list[int]:
        ids = list(_encoded(self._plain(continues), text).ids)
        if not self._control_ids.isdisjoint(ids):  # never yet: `without_control` is to see to it
            name = self.token_text(next(i for i in ids if i in self._control_ids))
            raise RequestError(f"the text cannot be told from the control token {name!r:.60}")
        return ids

    def _whole(self, continues: bool) -> HfTokenizer:
        return (self._continued if continues else None) or self._tokenizer

    def _plain(self, continues: bool) -> HfTokenizer:
        return (self._plain_continued if continues else None) or self._plain_tokenizer

    # Instances of their own: the library's switch is mutable state that threads would share.

    @cached_property
    def _plain_tokenizer(self) -> HfTokenizer:
        return _load(without_control(self._parts), special_as_text=True)

    @cached_property
    def _continued(self) -> HfTokenizer | None:
        parts = continued(self._parts)
        return None if parts is None else _load(parts)

    @cached_property
    def _plain_continued(self) -> HfTokenizer | None:
        parts = continued(self._parts)
        return None if parts is None else _load(without_control(parts), special_as_text=True)

    def _check(self, vocab_size: int) -> None:
        """Refuse what the library numbers in another way than the document."""
        for token in self._parts["added_tokens"]:
            found = self._tokenizer.token_to_id(token["content"])
            if found != token["id"]:
                raise ModelError(
                    f"the tokenizer cannot be used: its added token {token['content']!r:.60} has "
                    f"id {token['id']}, and would get {found}",
                    remedy=DAMAGED_REMEDY,
                )
        for name, token_id in (("bos", self.bos_token_id), ("eos", self.eos_token_id)):
            if token_id is not None and not 0 <= token_id < vocab_size:
                raise ModelError(
                    f"the tokenizer's {name} token is {token_id}, and the model has {vocab_size}",
                    remedy=DAMAGED_REMEDY,
                )


def _load(parts: dict[str, Any], *, special_as_text: bool = False) -> HfTokenizer:
    try:
        tokenizer = HfTokenizer.from_str(json.dumps(parts))
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise ModelError(
            f"the tokenizer cannot be read: {error!s:.200}", remedy=DAMAGED_REMEDY
        ) from error
    tokenizer.encode_special_tokens = special_as_text
    return tokenizer


def _encoded(tokenizer: HfTokenizer, text: str) -> Encoding:
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError("the text holds a lone surrogate and is no valid Unicode") from error
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise RequestError(f"the model's tokenizer fails at the text: {error!s:.100}") from error


def _is_panic(error: BaseException) -> bool:
    """The library's panics are no `Exception`: they would end a process that a text is sent to."""
    return type(error).__name__ == "PanicException"


def _unknown_ids(model: dict[str, Any]) -> frozenset[int]:
    """The token for what has none: users may write that, and it controls nothing."""
    is_unigram = model["type"] == "Unigram"
    found = model.get("unk_id") if is_unigram else model["vocab"].get(model.get("unk_token"))
    return frozenset() if found is None else frozenset({found})
