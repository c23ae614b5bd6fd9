"""Cuts a text's tokens into the windows that are scored, as llama.cpp's perplexity tool does.

Windows lie side by side, and what does not fill the last one is left out. In each the model reads
from the start, and the tokens of the second half are scored, each given all that is before it in
the window: positions window/2 .. window-2 predict the tokens at window/2 + 1 .. window-1. A model
that wants a beginning-of-sequence token gets it in place of each window's first token. Figures of
the two tools compare: https://github.com/ggml-org/llama.cpp/tree/master/tools/perplexity
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError, RequestError
from shared.text.tokenizer import Tokenizer

MIN_WINDOW = 8
MAX_TEXT_CHARS = 16 << 20  # at once: a tokenizer holds some 150 bytes for each
MIN_START_CHARS = 1 << 16
CHARS_PER_TOKEN = 8  # first guess: English has 4, indented code more
TOKENS_NEAR_CUT = 256  # that may be others than those of the whole text

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Windows:
    """`inputs` int32 (N, window), what the model reads; `targets` int32 (N, scored), what it should
    have predicted at the positions from `first_scored` on; `num_tokens` those of the text as far as
    it was read."""

    inputs: Ids
    targets: Ids
    first_scored: int
    num_tokens: int

    def first(self, number: int) -> Windows:
        """The first so many of them."""
        return replace(self, inputs=self.inputs[:number], targets=self.targets[:number])


def cut_windows(
    text: str, tokenizer: Tokenizer, *, window: int, max_windows: int = 0, remedy: str = ""
) -> Windows:
    """The windows of a text, at most `max_windows` of them unless that is 0; then as much of the
    text is read as they take. `remedy` is what else helps if the text is too short.

    Raises `ConfigError` for a window of less than 8 tokens, `RequestError` for a text that does not
    fill one, or is too long to be tokenised at once.
    """
    if window < MIN_WINDOW:
        raise ConfigError(f"--window must be at least {MIN_WINDOW} tokens, got {window}")
    ids = _ids(text, tokenizer, max_windows * window)
    num_windows = len(ids) // window
    if num_windows == 0:
        raise RequestError(
            f"the text has {len(ids)} tokens, fewer than one window of {window}",
            remedy="give a longer text" + remedy,
            param="text",
        )
    if max_windows:
        num_windows = min(num_windows, max_windows)
    inputs = ids[: num_windows * window].reshape(num_windows, window)
    first = window // 2
    targets = inputs[:, first + 1 :].copy()
    if tokenizer.add_bos and tokenizer.bos_token_id is not None:
        inputs[:, 0] = tokenizer.bos_token_id
    return Windows(inputs, targets, first, len(ids))


def _ids(text: str, tokenizer: Tokenizer, num_wanted: int) -> Ids:
    """The tokens of a text, at least the first `num_wanted` of them; all for 0."""
    num_chars = max(MIN_START_CHARS, CHARS_PER_TOKEN * num_wanted) if num_wanted else len(text)
    while True:
        num_chars = min(num_chars, len(text))
        if num_chars > MAX_TEXT_CHARS:
            raise RequestError(
                f"the text has {len(text)} characters; at most {MAX_TEXT_CHARS} are tokenised",
                remedy="take a shorter text, or fewer windows of it",
                param="text",
            )
        start = text[:num_chars]
        ids = np.array(tokenizer.encode(start, parse_special=False, add_bos=True), np.int32)
        if num_chars == len(text):
            return ids
        if len(ids) >= num_wanted + TOKENS_NEAR_CUT:
            return ids[:-TOKENS_NEAR_CUT]
        num_chars *= 4
