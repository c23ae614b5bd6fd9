"""Hard matrices and activations, and what it means that arrays are equal."""

from __future__ import annotations

import numpy as np

from shared.kernel.chunks import BLOCK_ROWS
from shared.kernel.matrix import PackedMatrix
from shared.quant.pack import pack_int4, pack_int8

F = np.float32
HARD_HALVES = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF], np.uint16)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def random_matrix(rng: np.random.Generator, kind: str, rows: int, groups: int) -> PackedMatrix:
    """Ordinary scales, with zeros, subnormals and the largest ones strewn in."""
    halves = (rng.standard_normal((2, rows, groups)) * 0.05).astype(np.float16)
    hard = rng.choice(HARD_HALVES, (2, rows, groups)).view(np.float16)
    scale, minimum = np.where(rng.random((2, rows, groups)) < 0.1, hard, halves)
    chunk_rows = BLOCK_ROWS * int(rng.integers(1, 4))
    if kind == "int4":
        nibbles = rng.integers(0, 256, (rows, groups, 16)).astype(np.uint8)
        packed = pack_int4(scale, minimum, nibbles, chunk_rows)
    else:
        q = rng.integers(-128, 128, (rows, groups, 32)).astype(np.int8)
        packed = pack_int8(scale, q, chunk_rows)
    return PackedMatrix(kind, rows, 32 * groups, chunk_rows, packed)


def random_activations(rng: np.random.Generator, rows: int, groups: int) -> np.ndarray:
    """Groups of every size from zero over subnormal to huge, some with one value that dominates."""
    x = rng.standard_normal((rows, groups, 32)).astype(F)
    x *= rng.choice(F([0, 1e-42, 1e-35, 2.0**-100, 1e-3, 1, 1, 1, 1e6]), (rows, groups, 1))
    x[rng.random(x.shape) < 0.02] *= 1000
    return x.reshape(rows, 32 * groups)
