"""Log probabilities of the model's own distribution: of its logits as they are, at temperature 1.

What `docs/arithmetic.md` says of the other numbers holds for these: the same logits give the same
bits on every machine, so nothing of libm is called. V vocab_size.
"""

from __future__ import annotations

import math

import numpy as np

from shared.kernel.matrix import Float32
from shared.kernel.reference import exp_or_zero
from shared.logprobs import TokenLogprobs

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_NUM_TERMS = 12  # of the series of ln: the next is below 2^-60 of the first


def token_logprobs(logits: Float32, token_id: int, num_top: int) -> TokenLogprobs:
    """Of `token_id`, and of the `num_top` likeliest of logits (V,); of equal ones the lower ids.

    logit - max - ln(sum of exp(logit - max)): the weights are those of sampling at temperature 1,
    their sum binary64, one after the other, the differences binary64, the result binary32.
    """
    largest = logits.max()
    weights = exp_or_zero(logits - largest)
    total = ln(float(np.cumsum(weights, dtype=np.float64)[-1]))

    def logprob(token: int) -> float:
        return float(np.float32(float(logits[token]) - float(largest) - total))

    top = _largest(logits, num_top) if num_top else []
    return TokenLogprobs.of(logprob(token_id), tuple((i, logprob(i)) for i in top))


def ln(x: float) -> float:
    """The natural logarithm of x > 0 in binary64, by additions, products and one division.

    x = m * 2^e with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh(s), s = (m - 1) / (m + 1), whose
    series is summed as a Horner polynomial in s^2.
    """
    m, e = math.frexp(x)  # exact
    if m < _SQRT_HALF:
        m, e = 2.0 * m, e - 1
    s = (m - 1.0) / (m + 1.0)
    square, series = s * s, 0.0
    for n in range(2 * _NUM_TERMS - 1, 0, -2):
        series = series * square + 1.0 / n
    return 2.0 * s * series + e * _LN2


def _largest(logits: Float32, count: int) -> list[int]:
    """Ids of the largest logits, in descending order; of equal ones the lower ids first."""
    count = min(count, len(logits))
    least = np.partition(logits, len(logits) - count)[len(logits) - count]
    ids = np.flatnonzero(logits >= least)  # ascending
    order = np.argsort(-logits[ids], kind="stable")
    found: list[int] = ids[order[:count]].tolist()
    return found
