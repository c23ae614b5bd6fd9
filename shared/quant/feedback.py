"""Rounds a matrix one input at a time and lets the inputs that are left make up for the error.

What a matrix gives for a text is what counts, not its weights: with H the second moments of its
inputs, the error is sum over rows of (w - v) H (w - v)'. Inputs go together, so an error in one can
be undone in part by others that are still to be rounded. That is Optimal Brain Surgeon's update in
the order of the columns, as GPTQ does it (Frantar et al. 2022, https://arxiv.org/abs/2210.17323),
here with the scale and min of each group of 32 from `shared.quant.search`.

R rows (outputs), C cols (inputs), G = C/32 groups.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.kernel.chunks import GROUP
from shared.kernel.matrix import Float32
from shared.quant.blocks import Int4Blocks, Int8Blocks
from shared.quant.nearest import nibbles_of
from shared.quant.pack import Half
from shared.quant.search import Fit, check_weights

# Of the mean of H's diagonal, added to it: what a text never showed must not be free to change.
DAMPING = 0.01

Float64 = npt.NDArray[np.float64]
FitGroups = Callable[[Float32, Float32 | None], Fit]
"""scale and min (n,) of groups (n, 32) with an importance of (n, 32)."""


def conditional_factor(moments: Float64) -> Float64:
    """The upper factor U (C, C) of the inverse of damped second moments, inverse = U' U.

    1 / U[j, j]^2 is what an error in input j costs when those after it make up for it. Raises
    `ModelError` for moments that are not finite, or those of no text.
    """
    if not np.isfinite(moments).all():
        raise ModelError("the second moments of the inputs are not finite")
    mean = float(np.diagonal(moments).mean())
    if mean <= 0:
        return np.eye(len(moments))
    damped = moments + DAMPING * mean * np.eye(len(moments))
    try:
        # inverse = U' U with U upper is damped = L L' with L = inverse of U; both from one Cholesky
        # of the matrix read backwards, which turns lower factors into upper ones.
        lower = np.linalg.cholesky(damped[::-1, ::-1])
    except np.linalg.LinAlgError as error:
        raise ModelError("the second moments of the inputs are no positive matrix") from error
    upper = lower[::-1, ::-1]  # damped = upper @ upper'
    factor: Float64 = np.linalg.inv(upper)
    return factor


def round_with_feedback(weights: Float32, factor: Float64, fit: FitGroups) -> Int4Blocks:
    """int4 of float32 (R, C), the columns rounded from the first to the last.

    `factor` is `conditional_factor`'s, `fit` one of `shared.quant.search`'s. Rows do not depend on
    each other. Raises `ModelError` for weights that fp16 cannot hold.
    """
    scale, minimum, q = _round_columns(weights, factor, fit, low=0, high=15)
    return Int4Blocks(scale, minimum, nibbles_of(q))


def round_int8_with_feedback(weights: Float32, factor: Float64) -> Int8Blocks:
    """The same to int8, with scale = max|w| / 127 of what a group is when its turn comes."""
    scale, _, q = _round_columns(weights, factor, _fit_int8, low=-127, high=127)
    return Int8Blocks(scale, q)


def _fit_int8(groups: Float32, importance: Float32 | None) -> Fit:
    largest = np.abs(groups).max(axis=1)
    scale = (largest / np.float32(127)).astype(np.float16).astype(np.float32)
    return scale, np.zeros_like(scale)


def _round_columns(
    weights: Float32, factor: Float64, fit: FitGroups, *, low: int, high: int
) -> tuple[Half, Half, npt.NDArray[np.int8]]:
    """scale and min fp16 (R, G), q int8 (R, G, 32)."""
    check_weights(weights)
    rows, cols = weights.shape
    groups = cols // GROUP
    left = np.array(weights, np.float32)  # what is still to be rounded, with the errors so far
    upper = factor.astype(np.float32)
    cost = (1.0 / np.diagonal(factor) ** 2).astype(np.float32)
    scale = np.empty((groups, rows), np.float32)
    minimum = np.empty((groups, rows), np.float32)
    q = np.empty((rows, cols), np.int8)
    errors = np.empty((rows, GROUP), np.float32)
    for group in range(groups):
        start, stop = group * GROUP, (group + 1) * GROUP
        here = np.ascontiguousarray(left[:, start:stop])
        importance = cost[start:stop] / cost[start:stop].mean()
        scale[group], minimum[group] = fit(here, np.broadcast_to(importance, here.shape))
        inverse = np.divide(
            1, scale[group], out=np.zeros(rows, np.float32), where=scale[group] != 0
        )
        for j in range(GROUP):
            column = here[:, j]
            nearest = np.clip(np.rint((column - minimum[group]) * inverse), low, high)
            q[:, start + j] = nearest
            kept = nearest * scale[group] + minimum[group]
            errors[:, j] = (column - kept) / upper[start + j, start + j]
            here[:, j + 1 :] -= np.outer(errors[:, j], upper[start + j, start + j + 1 : stop])
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return (
        np.ascontiguousarray(scale.T, np.float16),
        np.ascontiguousarray(minimum.T, np.float16),
        q.reshape(rows, groups, GROUP),
    )


def output_errors(weights: Float32, kept: Float32, moments: Float64) -> Float64:
    """Of each row, (R,): (w - v) H (w - v)', by how much the text's outputs are off."""
    off = (weights - kept).astype(np.float64)
    errors: Float64 = np.einsum("rc,rc->r", off @ moments, off)
    return errors
