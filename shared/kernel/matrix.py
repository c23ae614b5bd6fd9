"""Owns what the kernel multiplies with: packed matrices as views of bytes. Computes nothing.

R rows (outputs), C cols (inputs), G = C/32 groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel.chunks import (
    BLOCK_ROWS,
    GROUP,
    block_bytes,
    chunk_bytes,
    int8_scale_bytes,
    matrix_bytes,
    num_blocks,
    num_chunks,
    num_groups,
)

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Unpacked:
    """A matrix as arrays: w[r, 32*g + j] = scale[g, r] * q[g, r, j] + min[g, r]."""

    q: npt.NDArray[np.int8]  # (G, R, 32); 0..15 for int4
    scale: Float32  # (G, R)
    min: Float32 | None  # (G, R); int4 only


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix of `rows` outputs and `cols` inputs, as it lies in a shard.

    `kind` is "int4", "int8" (chunks, docs/arithmetic.md) or "f32" (row-major; for look-up only).
    `data` is uint8, C-contiguous, of exactly the bytes that the geometry asks for; anything else
    raises `KernelError`.
    """

    kind: str
    rows: int
    cols: int
    chunk_rows: int
    data: Bytes

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.ndim != 1 or not self.data.flags.c_contiguous:
            raise KernelError("a packed matrix must be a flat contiguous array of bytes")
        if not all(0 <= size < 2**31 for size in (self.rows - 1, self.cols - 1, self.chunk_rows)):
            raise KernelError(  # C keeps them in int32
                f"no matrix is {self.rows} x {self.cols} in chunks of {self.chunk_rows} rows"
            )
        if self.kind == "f32":
            wanted = 4 * self.rows * self.cols
        else:
            wanted = matrix_bytes(self.kind, self.rows, self.cols, self.chunk_rows)
        if self.data.nbytes != wanted:
            raise KernelError(
                f"{self.kind} matrix of {self.rows} x {self.cols} in chunks of {self.chunk_rows} "
                f"rows must have {wanted} bytes, got {self.data.nbytes}"
            )

    @cached_property
    def unpacked(self) -> Unpacked:
        """The values, unpacked once and kept (4 x the bytes of int4): for the reference alone."""
        return _unpack_int4(self) if self.kind == "int4" else _unpack_int8(self)

    @cached_property
    def f32(self) -> Float32:
        """(R, C), for kind "f32"; a view on little-endian hosts."""
        if self.kind != "f32":
            raise KernelError(f"matrix is {self.kind}, not f32")
        values = self.data.view("<f4").astype(np.float32, copy=False)
        return values.reshape(self.rows, self.cols)


def chunk_blocks(matrix: PackedMatrix) -> Iterator[tuple[int, Bytes]]:
    """For each chunk: its first row, and its row blocks, uint8 (blocks, block_bytes)."""
    size = block_bytes(matrix.kind, matrix.cols)
    stride = chunk_bytes(matrix.kind, matrix.cols, matrix.chunk_rows)
    for chunk in range(num_chunks(matrix.rows, matrix.chunk_rows)):
        first_row = chunk * matrix.chunk_rows
        blocks = num_blocks(min(matrix.chunk_rows, matrix.rows - first_row))
        start = chunk * stride
        yield first_row, matrix.data[start : start + blocks * size].reshape(blocks, size)


def _unpack_int4(matrix: PackedMatrix) -> Unpacked:
    groups = num_groups(matrix.cols)
    padded = num_blocks(matrix.rows) * BLOCK_ROWS
    q = np.empty((groups, padded, GROUP), np.int8)
    factors = np.empty((2, groups, padded), np.float32)  # scale, min
    for first, blocks in chunk_blocks(matrix):
        rows = slice(first, first + len(blocks) * BLOCK_ROWS)
        parts = blocks.reshape(len(blocks), groups, 5, 64)  # scales and mins, then 4 slabs
        halves = parts[:, :, 0].view("<f2").reshape(len(blocks), groups, 2, BLOCK_ROWS)
        factors[:, :, rows] = halves.transpose(2, 1, 0, 3).reshape(2, groups, -1)
        slabs = parts[:, :, 1:].reshape(len(blocks), groups, 4, BLOCK_ROWS, 4)
        nibbles = slabs.transpose(1, 0, 3, 2, 4).reshape(groups, -1, 16)  # (G, rows, 16)
        q[:, rows, :16] = nibbles & 15
        q[:, rows, 16:] = nibbles >> 4
    q, factors = q[:, : matrix.rows], factors[:, :, : matrix.rows]
    return Unpacked(q, factors[0], factors[1])


def _unpack_int8(matrix: PackedMatrix) -> Unpacked:
    groups = num_groups(matrix.cols)
    padded = num_blocks(matrix.rows) * BLOCK_ROWS
    q = np.empty((groups, padded, GROUP), np.int8)
    scale = np.empty((groups, padded), np.float32)
    scale_end = int8_scale_bytes(matrix.cols)
    for first, blocks in chunk_blocks(matrix):
        rows = slice(first, first + len(blocks) * BLOCK_ROWS)
        halves = np.ascontiguousarray(blocks[:, : groups * BLOCK_ROWS * 2]).view("<f2")
        by_group = halves.reshape(len(blocks), groups, BLOCK_ROWS).transpose(1, 0, 2)
        scale[:, rows] = by_group.reshape(groups, -1)
        slabs = blocks[:, scale_end:].reshape(len(blocks), groups, 8, BLOCK_ROWS, 4)
        q[:, rows] = slabs.transpose(1, 0, 3, 2, 4).reshape(groups, -1, GROUP).view(np.int8)
    return Unpacked(q[:, : matrix.rows], scale[:, : matrix.rows], None)
