"""Decides how many tokens of a sequence are guessed ahead. Pure: values in, a number out.

A guess costs the rows that check it, in every layer group, and gains the hops that it saves. Both
are weighed by how often guesses of its kind came true. k drafted tokens, R rows of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Rows of one sequence in a step; more gain little, as one wrong guess makes the rest useless.
MAX_DRAFT = 5
MAX_MATCH = 3  # tokens of the n-gram that is looked up
MIN_GAIN = 1.2  # below this the estimate is not worth its noise

# Of guesses that follow 1, 2 and 3 known tokens, before any were seen; as good as 4 seen ones.
_PRIOR_RATES = (0.05, 0.2, 0.5)
_PRIOR_TRIES = 4.0
_DECAY = 0.9  # of what was seen, at every step: texts change
# Time of a batch of 1 to 6 rows over that of one, and of each further row: SmolLM2-135M, layers and
# head, on one core. Up to 4 rows reading the weights is most of it; then every row has its price.
_FEW_ROWS = (1.0, 1.13, 1.49, 1.49, 1.85, 2.0)
_COST_PER_ROW = 0.45


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often guessed tokens were right, by the length of the n-gram that they followed."""

    hits: tuple[float, ...] = (0.0,) * MAX_MATCH
    tries: tuple[float, ...] = (0.0,) * MAX_MATCH

    def rate(self, match: int) -> float:
        """Chance that a token is right if those before it are; `match` in 1..MAX_MATCH."""
        prior = _PRIOR_RATES[match - 1]
        return (self.hits[match - 1] + prior * _PRIOR_TRIES) / (
            self.tries[match - 1] + _PRIOR_TRIES
        )

    def noted(self, match: int, guessed: Sequence[int], came: Sequence[int]) -> Acceptance:
        """After tokens came where others (or the same) were guessed; the first miss ends it."""
        num_hits = common_prefix(guessed, came)
        missed = num_hits < min(len(guessed), len(came))
        hits, tries = list(self.hits), list(self.tries)
        hits[match - 1] = hits[match - 1] * _DECAY + num_hits
        tries[match - 1] = tries[match - 1] * _DECAY + num_hits + missed
        return Acceptance(tuple(hits), tuple(tries))


def draft_length(rate: float, *, num_sequences: int, longest: int = MAX_DRAFT) -> int:
    """k, the number of tokens to guess for each of `num_sequences` in a batch; 0 is often best.

    `rate` is the chance of a guess, and `longest` bounds k.
    """
    best, best_gain = 0, MIN_GAIN
    for k in range(1, longest + 1):
        rows_cost = step_cost(num_sequences * (1 + k)) / step_cost(num_sequences)
        gain = expected_tokens(rate, k) / rows_cost
        if gain > best_gain:
            best, best_gain = k, gain
    return best


def expected_tokens(rate: float, k: int) -> float:
    """Tokens that a step with k guesses gives: one, and each guess up to the first miss."""
    return sum(rate**i for i in range(k + 1))


def step_cost(num_rows: int) -> float:
    """Time of a batch of R rows over that of one row."""
    few = _FEW_ROWS[min(num_rows, len(_FEW_ROWS)) - 1]
    return few + _COST_PER_ROW * max(0, num_rows - len(_FEW_ROWS))


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count
