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

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Windows:
    """`inputs` int32 (N, window), what the model reads; `targets` int32 (N, scored), what it should
    have predicted at the positions from `first_scored` on."""

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
    """The windows of a text, at most `max_windows` of them unless that is 0. `remedy` is what else
    helps if the text is too short.

    Raises `ConfigError` for a window of less than 8 tokens, `RequestError` for a text that does not
    fill one.
    """
    if window < MIN_WINDOW:
        raise ConfigError(f"--window must be at least {MIN_WINDOW} tokens, got {window}")
    ids = np.array(tokenizer.encode(text, parse_special=False, add_bos=True), np.int32)
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
