"""Guesses the next tokens of one sequence from its own text. Knows no store and no model.

Prompt lookup: what followed the last tokens when they stood there before. N tokens of the history.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.worker.draft_policy import MAX_DRAFT, MAX_MATCH, Acceptance, draft_length


class Guesser:
    """The tokens of a sequence so far, and how its guesses fared.

    Every step is guessed, whether it is sent or not: so it is known at no cost when a text begins
    to repeat itself.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.num_tokens = len(token_ids)
        self.acceptance = Acceptance()
        self._ids = np.empty(max(64, 2 * len(token_ids)), np.int32)
        self._ids[: self.num_tokens] = token_ids
        self._guess: tuple[int, tuple[int, ...], int] | None = None  # position, tokens, match

    def follow(self, position: int, token_ids: Sequence[int]) -> bool:
        """Take the tokens from `position` on. False when some before them never came here."""
        if position > self.num_tokens:
            return False
        if self._guess is not None and self._guess[0] == position:
            _, guessed, match = self._guess
            self.acceptance = self.acceptance.noted(match, guessed, token_ids)
        self._guess = None
        self.num_tokens = position + len(token_ids)
        if self.num_tokens > len(self._ids):
            self._ids = np.resize(self._ids, 2 * self.num_tokens)
        self._ids[position : self.num_tokens] = token_ids
        return True

    def guess(self, *, num_sequences: int, longest: int) -> tuple[int, ...]:
        """The tokens worth checking in the next step, at most `longest`; often none."""
        guessed, match = look_up(self._ids[: self.num_tokens])
        if not guessed:
            return ()
        self._guess = (self.num_tokens, guessed, match)
        k = draft_length(
            self.acceptance.rate(match),
            num_sequences=num_sequences,
            longest=min(longest, MAX_DRAFT),
        )
        return guessed[:k]


def look_up(history: npt.NDArray[np.int32]) -> tuple[tuple[int, ...], int]:
    """What may follow a history (N,), and the number of tokens of the n-gram that it followed.

    The longest suffix of at most MAX_MATCH tokens that stood there before counts, of several places
    the last. What repeats right up to the end is taken to go on so.
    """
    if len(history) < 2:
        return (), 0
    # 7 us at 2,048 tokens and 40 at 32,768, less than an index costs to keep.
    ends = np.flatnonzero(history[:-1] == history[-1])
    if not len(ends):
        return (), 0
    match = 1
    while match < MAX_MATCH and match < len(history) - 1:
        longer = ends[ends >= match]
        longer = longer[history[longer - match] == history[-1 - match]]
        if not len(longer):
            break
        ends, match = longer, match + 1
    after = int(ends[-1]) + 1
    period = len(history) - after
    places = after + np.arange(MAX_DRAFT) % period
    return tuple(history[places].tolist()), match
