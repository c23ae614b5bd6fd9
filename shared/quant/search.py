"""Finds the scale and min of each group of 32 weights. Knows no file format, no model and no chunk.

What `shared.quant.nearest` takes from the extremes of a group is searched for here. The error of a
group is

    sum_j importance_j * (scale * q_j + min - w_j)^2

with scale and min as fp16 keeps them; importance is the mean square of the input that the weight
meets, or 1. The search starts from several ranges of a group, some cut and some stretched, and from
each takes turns: round q for the scale and min at hand, then the least-squares scale and min for
those q (as Lloyd's algorithm does for its centres). It keeps the best it has seen, plain
quantisations among them, so it is never worse than they are.

R rows (outputs), C cols (inputs), G = C/32 groups, n groups of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.kernel.chunks import GROUP
from shared.kernel.matrix import Float32
from shared.quant.blocks import Int4Blocks
from shared.quant.nearest import in_groups, nibbles_of

F = np.float32
Fit = tuple[Float32, Float32]
"""scale and min of n groups, float32 (n,) with values that fp16 has."""

BLOCK_GROUPS = 8192  # 1 MiB of weights: the block's arrays stay in a second-level cache or near it
NUM_TURNS = 2
MAX_Q = F(15)
MAX_HALF = 65504.0

# Where the search starts: parts of a group's range that are cut off at its low and high end. What
# is negative stretches, so that the extremes of a group need not be its first and last step.
STARTS = (
    (0.0, 0.0), (0.03, 0.03), (0.06, 0.06), (0.10, 0.10), (0.15, 0.15),
    (0.0, 0.08), (0.08, 0.0), (0.0, 0.16), (0.16, 0.0),
    (-0.035, -0.035), (0.0, -0.072), (-0.072, 0.0),
)  # fmt: skip
# The same for symmetric groups, whose only freedom is the scale: steps at the largest |w|.
SYMMETRIC_STARTS = (-8.5, -8.0, -7.5, -7.0, -6.5, -6.0, -5.5, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0, 8.5)


def search_affine(
    weights: Float32, importance: Float32 | None = None, *, num_threads: int = 1
) -> Int4Blocks:
    """Affine int4 of float32 (R, C) with the least error that the search finds in each group.

    `importance` float32 (C,) weighs the inputs. Raises `ModelError` for weights that fp16 cannot
    hold.
    """
    return _assemble(weights, importance, fit_affine, num_threads=num_threads)


def search_symmetric(
    weights: Float32, importance: Float32 | None = None, *, num_threads: int = 1
) -> Int4Blocks:
    """The same with min = -8 * scale, as GGUF's Q4_0 has it; a scale may be negative."""
    return _assemble(weights, importance, fit_symmetric, num_threads=num_threads)


def rounded(groups: Float32, scale: Float32, minimum: Float32) -> Float32:
    """The q in 0..15 nearest to (w - min) / scale, (n, 32); 0 where the scale is 0."""
    wide = scale[:, None]
    q: Float32 = np.zeros_like(groups)
    np.divide(groups - minimum[:, None], wide, out=q, where=wide != 0)
    np.rint(q, out=q)
    np.clip(q, F(0), MAX_Q, out=q)
    return q


def group_errors(
    groups: Float32, scale: Float32, minimum: Float32, importance: Float32 | None = None
) -> Float32:
    """The weighted squared error of each group, (n,)."""
    off = rounded(groups, scale, minimum)
    off *= scale[:, None]
    off += minimum[:, None]
    off -= groups
    return _sums(off if importance is None else off * importance, off)


def fit_affine(x: Float32, importance: Float32 | None) -> Fit:
    """scale and min of the least error that is found, of groups (n, 32), as fp16 has them.

    `importance` is (n, 32), or None for 1.
    """
    low, high = x.min(axis=1), x.max(axis=1)  # (n,)
    span = high - low
    best = _Best(x, importance)
    best.offer(*_range_fit(x))
    best.offer(*_symmetric_at(x, F(7)))
    for cut_low, cut_high in STARTS:
        minimum = low + F(cut_low) * span
        scale = (span * F(1 - cut_low - cut_high)) / MAX_Q
        for _ in range(NUM_TURNS):
            scale, minimum = _least_squares(x, rounded(x, scale, minimum), importance)
        best.offer(scale, minimum)
    # The fp16 of the best scale is known now: one more turn for the best there is.
    best.offer(*_least_squares(x, rounded(x, best.scale, best.minimum), importance))
    return best.scale, best.minimum


def fit_symmetric(x: Float32, importance: Float32 | None) -> Fit:
    """The same with min = -8 * scale."""
    best = _Best(x, importance)
    best.offer(*_symmetric_at(x, F(7)))
    for steps in SYMMETRIC_STARTS:
        scale, minimum = _symmetric_at(x, F(steps))
        q = rounded(x, scale, minimum) - F(8)
        weighted = q if importance is None else q * importance
        below = _sums(weighted, q)
        scale = np.divide(_sums(weighted, x), below, out=np.zeros_like(below), where=below > 0)
        best.offer(*_symmetric_of(scale))
    return best.scale, best.minimum


class _Best:
    """The fit with the least error so far, of each group."""

    def __init__(self, x: Float32, importance: Float32 | None) -> None:
        self._x = x
        self._importance = importance
        self._error = np.full(len(x), np.inf, np.float32)
        self.scale = np.zeros(len(x), np.float32)
        self.minimum = np.zeros(len(x), np.float32)

    def offer(self, scale: Float32, minimum: Float32) -> None:
        """Keep it where it is better, as fp16 has it, and where fp16 has it."""
        scale, minimum = _as_half(scale), _as_half(minimum)
        with np.errstate(over="ignore", invalid="ignore"):
            error = group_errors(self._x, scale, minimum, self._importance)
        better = error < self._error  # false for NaN
        self._error[better] = error[better]
        self.scale[better] = scale[better]
        self.minimum[better] = minimum[better]


def _range_fit(x: Float32) -> Fit:
    minimum = _as_half(x.min(axis=1))
    return (x.max(axis=1) - minimum) / MAX_Q, minimum


def _symmetric_at(x: Float32, steps: np.float32) -> Fit:
    """The largest |w| of each group lies at that many steps, in its own direction if negative."""
    at = np.abs(x).argmax(axis=1)
    largest = np.take_along_axis(x, at[:, None], axis=1)[:, 0]
    signed: Float32 = largest if steps < 0 else np.abs(largest)
    return _symmetric_of(signed / steps)


def _symmetric_of(scale: Float32) -> Fit:
    scale = _as_half(scale)
    return scale, F(-8) * scale


def _least_squares(x: Float32, q: Float32, importance: Float32 | None) -> Fit:
    """The scale and min of the least error for given q; of equal q, their mean and scale 0."""
    low = x.min(axis=1)
    x = x - low[:, None]  # near its own size, so that binary32 sums lose little
    weighted = q if importance is None else q * importance
    sum_qq, sum_qx = _sums(weighted, q), _sums(weighted, x)
    sum_q = weighted.sum(axis=1)
    if importance is None:
        total, sum_x = np.full_like(sum_q, x.shape[1]), x.sum(axis=1)
    else:
        weights = np.broadcast_to(importance, x.shape)
        total, sum_x = weights.sum(axis=1), _sums(weights, x)
    determinant = total * sum_qq - sum_q * sum_q
    solvable = determinant > F(1e-5) * total * sum_qq
    scale = np.divide(
        total * sum_qx - sum_q * sum_x, determinant, out=np.zeros_like(total), where=solvable
    )
    minimum = np.divide(sum_x - scale * sum_q, total, out=np.zeros_like(total), where=total > 0)
    return scale, minimum + low


def _sums(a: Float32, b: Float32) -> Float32:
    """Of the products in each group, (n,)."""
    sums: Float32 = np.einsum("nj,nj->n", a, b)
    return sums


def _as_half(values: Float32) -> Float32:
    """As fp16 keeps them; infinite where it cannot."""
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def _assemble(
    weights: Float32,
    importance: Float32 | None,
    fit: Callable[[Float32, Float32 | None], Fit],
    *,
    num_threads: int = 1,
) -> Int4Blocks:
    """Fit blocks of rows, in any order, and put them together."""
    check_weights(weights)
    rows, groups = in_groups(weights).shape[:2]
    weights_of_inputs = None
    if importance is not None:
        weights_of_inputs = checked_importance(importance, weights.shape[1])
    scale = np.empty((rows, groups), np.float16)
    minimum = np.empty((rows, groups), np.float16)
    nibbles = np.empty((rows, groups, GROUP // 2), np.uint8)

    def fit_rows(part: slice) -> None:
        x = np.ascontiguousarray(weights[part], np.float32).reshape(-1, GROUP)
        here = None
        if weights_of_inputs is not None:
            repeats = len(x) // groups
            here = np.tile(weights_of_inputs.reshape(groups, GROUP), (repeats, 1))
        found_scale, found_minimum = fit(x, here)
        scale[part] = found_scale.reshape(-1, groups)
        minimum[part] = found_minimum.reshape(-1, groups)
        q = rounded(x, found_scale, found_minimum).astype(np.int8)
        nibbles[part] = nibbles_of(q.reshape(-1, groups, GROUP))

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(fit_rows, _row_blocks(rows, groups)))
    return Int4Blocks(scale, minimum, nibbles)


def _row_blocks(rows: int, groups: int) -> Iterator[slice]:
    step = max(1, BLOCK_GROUPS // groups)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def check_weights(weights: npt.NDArray[np.floating]) -> None:
    """Raise `ModelError` unless they are a matrix of numbers that fp16 can hold."""
    if weights.ndim != 2 or weights.shape[1] % GROUP:
        raise ModelError(f"weights must be (rows, a multiple of {GROUP} cols), got {weights.shape}")
    largest = float(np.abs(weights).max(initial=0.0))
    if not largest <= MAX_HALF:  # of NaN too
        row, col = (int(i) for i in np.argwhere(~(np.abs(weights) <= MAX_HALF))[0])
        raise ModelError(f"the weight at row {row}, col {col} is {weights[row, col]}: beyond fp16")


def checked_importance(importance: Float32, cols: int) -> Float32:
    """It, scaled to a mean of 1. Inputs that are always 0 keep a little weight: another text may
    have them. Raises `ModelError` unless it is (cols,), finite and not negative."""
    if importance.shape != (cols,):
        raise ModelError(f"importance must be ({cols},), got {importance.shape}")
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise ModelError("importance holds a value that is negative or not finite")
    mean = float(importance.mean(dtype=np.float64))
    if mean == 0:
        return np.ones(cols, np.float32)
    scaled: Float32 = np.maximum(importance / mean, 1e-4).astype(np.float32)
    return scaled
