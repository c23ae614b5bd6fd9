"""Turns logits into a token id. Knows nothing of queues, messages or text.

The order is vLLM's: what changes logits, then temperature, top_k, min_p and top_p. All rules below
depend on values alone, so that the same logits, parameters, seed, position and tokens before it
give the same token on every machine:

- processors (`shared/model/logits.py`) change a copy of the logits, one after the other; greedy is
  the lowest id of the largest logit that there is then;
- softmax weights are exp((logit - max) / temperature) in binary32 by the kernel's exp, 0 below -87;
- top_k keeps the k largest logits; min_p those with a weight of at least binary32(min_p), as the
  largest weight is exactly 1; top_p, of what is left, the shortest run of weights in descending
  order whose sum reaches top_p of their sum; of equal ones the lower ids are kept first, and one is
  always kept;
- sums are binary64, one after the other (np.cumsum);
- a uniform number u comes from Philox with key = seed, counter = position: the upper 53 bits of its
  first word. The kept tokens in ascending id order divide u * sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel.matrix import Float32
from shared.kernel.reference import exp_or_zero
from shared.model.logits import LogitsProcessor

Ids = npt.NDArray[np.intp]


def sample(
    logits: Float32,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    position: int,
    min_p: float = 0.0,
    processors: Sequence[LogitsProcessor] = (),
) -> int:
    """Draw a token id from logits (V,), which stay as they are.

    temperature 0 is greedy (the lowest id of the largest logit); top_k 0, top_p 1 and min_p 0 are
    off. `position` is that of the token that is drawn; the `processors` have seen those before it.
    Raises `KernelError` for logits not finite, or when a processor leaves none.
    """
    largest = int(np.argmax(logits))  # of the first NaN, if there is one
    if not (math.isfinite(logits[largest]) and math.isfinite(logits.min())):
        raise KernelError("logits are not finite")
    if processors:
        logits = logits.copy()
        for processor in processors:
            processor.process(logits)
        largest = int(np.argmax(logits))
        if not math.isfinite(logits[largest]):
            raise KernelError("no token is left to draw")
    scale = np.float32(temperature)
    if scale == 0 or top_k == 1:  # a temperature below binary32 is greedy too
        return largest
    ids = _top_k(logits, top_k)
    chosen = logits if ids is None else logits[ids]
    with np.errstate(over="ignore"):  # -infinity has weight 0
        weights = exp_or_zero((chosen - chosen.max()) / scale)
    if min_p > 0.0:
        kept = np.flatnonzero(weights >= np.float32(min_p))
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    if top_p < 1.0:
        kept = _top_p(weights, top_p)
        ids = kept if ids is None else ids[kept]
        weights = weights[kept]
    sums = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(sums, uniform(seed, position) * sums[-1], side="right"))
    return index if ids is None else int(ids[index])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 bits that depends on seed and position only."""
    word = int(np.random.Philox(key=seed, counter=position).random_raw())
    return (word >> 11) * 2.0**-53


def _top_k(logits: Float32, top_k: int) -> Ids | None:
    """Ids of the top_k largest logits, ascending; None when all are kept."""
    if not 0 < top_k < len(logits):
        return None
    least = np.partition(logits, len(logits) - top_k)[len(logits) - top_k]
    return _at_least(logits, least, top_k)


def _top_p(weights: Float32, top_p: float) -> Ids:
    """Ids of the shortest descending run of weights that sums to top_p of all, ascending."""
    descending = np.sort(weights)[::-1]  # values alone: faster than their order, and no tie matters
    sums = np.cumsum(descending, dtype=np.float64)
    count = min(int(np.searchsorted(sums, top_p * sums[-1], side="left")) + 1, len(weights))
    return _at_least(weights, descending[count - 1], count)


def _at_least(values: Float32, least: np.float32, count: int) -> Ids:
    """The ids of `count` largest values, the smallest of which is `least`; lower ids first among
    equals. Ascending."""
    above = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))
