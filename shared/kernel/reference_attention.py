"""Defines attention over KV pages, in NumPy: one pass over the pages with a running softmax.

T rows of one sequence, H query heads, K kv heads, hd head_dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel.matrix import Float32
from shared.kernel.reference import F, dot8, exp_or_zero, from_half, softcap, sum8, to_half

PAGE_POSITIONS = 16

Page = npt.NDArray[np.uint16]  # (layers, K, 2: keys and values, 16, hd), fp16 bits


def store_kv(
    pages: Sequence[Page], layer: int, start_position: int, k: Float32, v: Float32
) -> None:
    """Write rows (T, K, hd) of keys and values at start_position and after."""
    for row, both in enumerate(np.stack([to_half(k), to_half(v)], axis=2)):  # (K, 2, hd)
        page, slot = divmod(start_position + row, PAGE_POSITIONS)
        pages[page][layer, :, :, slot] = both


def attention(
    q: Float32,
    pages: Sequence[Page],
    layer: int,
    start_position: int,
    score_scale: float,
    *,
    window: int = 0,
    score_softcap: float = 0.0,
) -> Float32:
    """(T, H, hd): row t attends to positions 0..start_position + t, whose keys and values are in
    the pages already; with a window to the last `window` of them. Raises `KernelError` when a score
    is not finite."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pages[0].shape[1]
    shape = (num_rows, num_kv_heads, num_heads // num_kv_heads)
    q = q.reshape(*shape, head_dim)  # query head h reads kv head h // (H / K)
    top = np.full(shape, -np.inf, np.float32)
    total = np.zeros(shape, np.float32)
    acc = np.zeros((*shape, head_dim), np.float32)
    positions = start_position + np.arange(num_rows)
    first = max(0, start_position - window + 1) if window else 0
    for index in range(
        first // PAGE_POSITIONS, (start_position + num_rows - 1) // PAGE_POSITIONS + 1
    ):
        base = index * PAGE_POSITIONS
        rows = slice(max(0, base - start_position), None)  # earlier rows end before this page
        keys, values = from_half(pages[index][layer]).transpose(1, 0, 2, 3)  # (K, 16, hd) each
        others = base + np.arange(PAGE_POSITIONS)
        present = positions[rows, None] >= others  # (n, 16)
        if window:
            present &= positions[rows, None] < others + window
        scores = _scores(q[rows], keys, present, F(score_scale), score_softcap, rows.start)
        page_top = scores.max(axis=-1)
        rises = page_top > top[rows]
        with np.errstate(invalid="ignore"):  # -inf - -inf, where it does not rise
            shift = np.where(rises, exp_or_zero(top[rows] - page_top), F(1))  # times 1 is exact
        top[rows] = np.where(rises, page_top, top[rows])
        with np.errstate(invalid="ignore"):  # of a row that sees nothing of the first pages
            p = exp_or_zero(scores - top[rows][..., None])
        p = np.where(present[:, None, None], p, F(0))
        total[rows] *= shift
        total[rows] += sum8(p)
        acc[rows] = _add_values(acc[rows] * shift[..., None], p, values, present)
    out: Float32 = np.divide(acc, total[..., None])
    return out.reshape(num_rows, num_heads, head_dim)


def _scores(
    q: Float32,
    keys: Float32,
    present: npt.NDArray[np.bool_],
    score_scale: np.float32,
    score_softcap: float,
    first_row: int,
) -> Float32:
    """(n, K, H/K, 16); -inf where a position is absent."""
    with np.errstate(over="ignore", invalid="ignore"):
        scores = dot8(q[..., None, :], keys[None, :, None]) * score_scale
    wanted = present[:, None, None]
    if not (np.isfinite(scores) | ~wanted).all():
        bad = ~(np.isfinite(scores) | ~wanted).all(axis=(1, 2, 3))
        raise KernelError(f"a score is not finite in row {first_row + int(np.argmax(bad))}")
    with np.errstate(over="ignore", invalid="ignore"):  # what is absent may be anything
        return np.where(wanted, softcap(scores, score_softcap), F(-np.inf))


def _add_values(
    acc: Float32, p: Float32, values: Float32, present: npt.NDArray[np.bool_]
) -> Float32:
    """acc (n, K, H/K, hd) + p_j * v_j for the present positions j, ascending."""
    for j in range(PAGE_POSITIONS):
        added = acc + p[..., j, None] * values[None, :, None, j]
        acc = np.where(present[:, j, None, None, None], added, acc)
    return acc
