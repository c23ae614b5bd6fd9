"""Turns a stream of token ids into text, never splitting a character. Knows no queue or request."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from shared.text.tokenizer import Tokenizer


class Detokenizer:
    """The text state of one answer.

    A character whose bytes lie in several tokens comes out with the last of them. What is no UTF-8
    whatever follows becomes U+FFFD, so that the pieces join to exactly `Tokenizer.decode`'s text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; "" while a character is still open.

        Raises `RequestError` for an id outside the vocabulary.
        """
        parts = (self._tokenizer.token_bytes(i, skip_special=self._skip_special) for i in token_ids)
        return self._decoder.decode(b"".join(parts))

    def finish(self) -> str:
        """The end of the text: U+FFFD if a character was left open, else ""."""
        return self._decoder.decode(b"", final=True)
