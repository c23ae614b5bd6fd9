"""Quantises float32 rows to the nearest values of a grid that the range of each group gives.

What a search for a better grid starts from, and is compared with. Each function takes float32
(R, C), C a multiple of 32, and raises `ModelError` for values that are not finite or a scale that
fp16 cannot hold. The best q is taken for the scale as fp16 keeps it, not for the exact one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.kernel.chunks import GROUP, num_groups
from shared.kernel.matrix import Float32
from shared.quant.blocks import Int4Blocks, Int8Blocks
from shared.quant.pack import Half, check_finite

# Rows of so many values are worked on at a time: float32 copies of them stay in a 1 MiB cache.
TILE_VALUES = 1 << 16


def quantize_int8(values: Float32) -> Int8Blocks:
    """Symmetric int8: scale = max|w| / 127, as GGUF's Q8_0."""
    grouped = in_groups(values)
    rows, groups = grouped.shape[:2]
    blocks = Int8Blocks(
        np.empty((rows, groups), np.float16), np.empty((rows, groups, GROUP), np.int8)
    )
    for tile in _tiles(grouped):
        scale = symmetric_scale(grouped[tile], 127)
        blocks.scale[tile] = scale
        blocks.q[tile] = nearest(grouped[tile], scale, low=-127, high=127)
    return blocks


def quantize_int4_symmetric(values: Float32) -> Int4Blocks:
    """Symmetric int4: scale = max|w| / 7, q in -7..7 kept as q + 8 with min = -8 * scale."""
    grouped = in_groups(values)
    blocks = _empty_int4(grouped)
    for tile in _tiles(grouped):
        scale = symmetric_scale(grouped[tile], 7)
        q = nearest(grouped[tile], scale, low=-7, high=7)
        q += 8
        blocks.scale[tile] = scale
        blocks.min[tile] = to_half(np.float32(-8) * scale.astype(np.float32), "min")
        blocks.nibbles[tile] = nibbles_of(q)
    return blocks


def quantize_int4_affine(values: Float32) -> Int4Blocks:
    """Affine int4: min and max of the group are q = 0 and q = 15, as GGUF's Q4_1."""
    grouped = in_groups(values)
    blocks = _empty_int4(grouped)
    for tile in _tiles(grouped):
        part = grouped[tile]
        low, high = part.min(axis=2), part.max(axis=2)
        minimum = to_half(low, "min")
        # From the minimum as it is kept, so that the largest value is still within reach.
        scale = to_half((high - minimum.astype(np.float32)) / np.float32(15), "scale")
        blocks.scale[tile], blocks.min[tile] = scale, minimum
        blocks.nibbles[tile] = nibbles_of(
            nearest(part - minimum.astype(np.float32)[..., None], scale, low=0, high=15)
        )
    return blocks


def in_groups(values: Float32) -> Float32:
    """(R, C) as (R, G, 32). Raises `ModelError` unless it is a finite matrix."""
    # A sum of finite values may overflow, so it only tells that a closer look is not needed.
    with np.errstate(over="ignore", invalid="ignore"):
        is_surely_finite = np.isfinite(values.sum(dtype=np.float32))
    if values.ndim != 2 or not (is_surely_finite or np.isfinite(values).all()):
        raise ModelError("weights must be a finite matrix of (rows, cols)")
    wide: Float32 = np.asarray(values, np.float32)
    return wide.reshape(len(values), num_groups(values.shape[1]), GROUP)


def symmetric_scale(groups: Float32, steps: int) -> Half:
    """max|w| / steps of each group, fp16 (R, G)."""
    largest = np.maximum(groups.max(axis=2), -groups.min(axis=2))
    return to_half(largest / np.float32(steps), "scale")


def nearest(groups: Float32, scale: Half, *, low: int, high: int) -> npt.NDArray[np.int8]:
    """The q of low..high nearest to w / scale, int8 (R, G, 32); 0 where the scale is 0."""
    wide = scale.astype(np.float32)
    usable = wide != 0
    q = groups / np.where(usable, wide, np.float32(1))[..., None]
    if not usable.all():
        q[~usable] = 0
    np.rint(q, out=q)
    np.clip(q, low, high, out=q)
    return q.astype(np.int8)


def nibbles_of(q: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    """(R, G, 32) values of 0..15 as uint8 (R, G, 16), in the order of `Int4Blocks`."""
    # Words of 8 bytes, since NumPy is slow at many short runs; no value has bits to lose.
    words = np.ascontiguousarray(q).view(np.uint64)
    nibbles = words[..., 2:] << np.uint64(4)
    nibbles |= words[..., :2]
    return nibbles.view(np.uint8)


def to_half(values: Float32, what: str) -> Half:
    """Rounded to fp16 (R, G). Raises `ModelError` naming `what` where that overflows."""
    with np.errstate(over="ignore"):
        half: Half = values.astype(np.float16)
    check_finite(what, half)
    return half


def _empty_int4(grouped: Float32) -> Int4Blocks:
    rows, groups = grouped.shape[:2]
    return Int4Blocks(
        np.empty((rows, groups), np.float16),
        np.empty((rows, groups), np.float16),
        np.empty((rows, groups, GROUP // 2), np.uint8),
    )


def _tiles(grouped: Float32) -> list[slice]:
    step = max(1, TILE_VALUES // max(1, grouped[0].size)) if len(grouped) else 1
    return [slice(start, start + step) for start in range(0, len(grouped), step)]
