"""Owns the way between quantised arrays and chunks. Knows no file format and no model.

R rows (outputs), C cols (inputs), G = C/32 groups. docs/arithmetic.md draws the bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError, ModelError
from shared.kernel.chunks import (
    BLOCK_ROWS,
    GROUP,
    aligned_zeros,
    block_bytes,
    chunk_bytes,
    int8_scale_bytes,
    matrix_bytes,
    num_blocks,
    num_chunks,
)
from shared.kernel.matrix import Float32, PackedMatrix, Unpacked
from shared.quant.blocks import Int4Blocks, Int8Blocks

Bytes = npt.NDArray[np.uint8]
Half = npt.NDArray[np.float16]


def pack_int4(
    scale: Half, minimum: Half, nibbles: Bytes, chunk_rows: int, *, out: Bytes | None = None
) -> Bytes:
    """Chunks of an int4 matrix.

    scale and minimum are fp16 (R, G); nibbles is uint8 (R, G, 16), byte j of a group holding
    element j low and element j + 16 high, as GGUF's Q4_0 and Q4_1 do. Returns uint8, aligned to 64:
    `out` if it is given, zeros of just the bytes that the chunks take. Raises `ModelError` naming
    row and group for a scale or min that is not finite.
    """
    rows, groups = _check_shapes(scale, nibbles, 16)
    if minimum.shape != scale.shape:
        raise KernelError(f"min has shape {minimum.shape}, scale {scale.shape}")
    check_finite("scale", scale)
    check_finite("min", minimum)
    cols = groups * GROUP
    packed = _room(out, matrix_bytes("int4", rows, cols, chunk_rows))
    words = _words(nibbles)  # (R, G, 4)
    for first, blocks, out in _chunks_of(packed, "int4", rows, cols, chunk_rows):
        parts = out.view("<u4").reshape(blocks, groups, 5, BLOCK_ROWS)
        halves = out.view("<f2").reshape(blocks, groups, 5, 2, BLOCK_ROWS)
        stop = min(first + chunk_rows, rows)
        parts[:, :, 1:] = _by_block(words[first:stop]).transpose(0, 2, 3, 1)
        halves[:, :, 0, 0] = _by_block(scale[first:stop]).transpose(0, 2, 1)
        halves[:, :, 0, 1] = _by_block(minimum[first:stop]).transpose(0, 2, 1)
    return packed


def pack_int8(
    scale: Half, q: npt.NDArray[np.int8], chunk_rows: int, *, out: Bytes | None = None
) -> Bytes:
    """Chunks of an int8 matrix: scale fp16 (R, G), q int8 (R, G, 32). Else as `pack_int4`."""
    rows, groups = _check_shapes(scale, q, GROUP)
    check_finite("scale", scale)
    cols = groups * GROUP
    packed = _room(out, matrix_bytes("int8", rows, cols, chunk_rows))
    words = _words(q)  # (R, G, 8)
    scale_end = int8_scale_bytes(cols)
    for first, blocks, out in _chunks_of(packed, "int8", rows, cols, chunk_rows):
        stop = min(first + chunk_rows, rows)
        by_block = out.reshape(blocks, -1)
        halves = by_block[:, : groups * BLOCK_ROWS * 2].view("<f2")
        halves.reshape(blocks, groups, BLOCK_ROWS)[:] = _by_block(scale[first:stop]).transpose(
            0, 2, 1
        )
        slabs = by_block[:, scale_end:].view("<u4").reshape(blocks, groups, 8, BLOCK_ROWS)
        slabs[:] = _by_block(words[first:stop]).transpose(0, 2, 3, 1)
    return packed


def pack_blocks(
    blocks: Int4Blocks | Int8Blocks, chunk_rows: int, *, out: Bytes | None = None
) -> Bytes:
    """Chunks of quantised rows. `out` and what is raised as for `pack_int4`.

    Whole chunks of a matrix may be packed one after the other, each into its part of the whole.
    """
    match blocks:
        case Int4Blocks(scale, minimum, nibbles):
            return pack_int4(scale, minimum, nibbles, chunk_rows, out=out)
        case Int8Blocks(scale, q):
            return pack_int8(scale, q, chunk_rows, out=out)


def unpack_int4(packed: Bytes, rows: int, cols: int, chunk_rows: int) -> tuple[Half, Half, Bytes]:
    """What `pack_int4` was given: scale, min and nibbles."""
    values = PackedMatrix("int4", rows, cols, chunk_rows, packed).unpacked
    assert values.min is not None
    q = values.q.transpose(1, 0, 2).astype(np.uint8)  # (R, G, 32)
    nibbles = _nibbles(q)
    return _to_half(values.scale.T), _to_half(values.min.T), nibbles


def unpack_int8(
    packed: Bytes, rows: int, cols: int, chunk_rows: int
) -> tuple[Half, npt.NDArray[np.int8]]:
    """What `pack_int8` was given: scale and q."""
    values = PackedMatrix("int8", rows, cols, chunk_rows, packed).unpacked
    return _to_half(values.scale.T), np.ascontiguousarray(values.q.transpose(1, 0, 2))


def dequantize(matrix: PackedMatrix) -> Float32:
    """The weights as float32 (R, C): q * scale, then + min."""
    if matrix.kind == "f32":
        return matrix.f32
    values: Unpacked = matrix.unpacked
    weights = values.q.astype(np.float32) * values.scale[:, :, None]
    if values.min is not None:
        weights = weights + values.min[:, :, None]
    return weights.transpose(1, 0, 2).reshape(matrix.rows, matrix.cols)


def check_finite(what: str, values: Half) -> None:
    """Raise `ModelError` naming row and group if an fp16 (R, G) holds infinity or NaN."""
    bad = (np.ascontiguousarray(values).view(np.uint16) & 0x7C00) == 0x7C00
    if bad.any():
        row, group = (int(i) for i in np.argwhere(bad)[0])
        raise ModelError(f"{what} at row {row}, group {group} is {values[row, group]}")


def _room(out: Bytes | None, num_bytes: int) -> Bytes:
    if out is None:
        return aligned_zeros(num_bytes)
    if out.nbytes != num_bytes:
        raise KernelError(f"the chunks take {num_bytes} bytes, out has {out.nbytes}")
    return out


def _check_shapes(scale: Half, values: npt.NDArray[np.generic], width: int) -> tuple[int, int]:
    if scale.ndim != 2 or scale.dtype != np.float16:
        raise KernelError(f"scale must be fp16 (rows, groups), got {scale.dtype} {scale.shape}")
    if values.shape != (*scale.shape, width):
        raise KernelError(f"values must be {(*scale.shape, width)}, got {values.shape}")
    return scale.shape[0], scale.shape[1]


def _words(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint32]:
    """The bytes of each group as 32-bit words: what a slab keeps together for a row."""
    if values.strides[-1] != values.itemsize:
        values = np.ascontiguousarray(values)
    words: npt.NDArray[np.uint32] = values.view("<u4")
    return words


def _chunks_of(
    packed: Bytes, kind: str, rows: int, cols: int, chunk_rows: int
) -> list[tuple[int, int, Bytes]]:
    """First row, number of row blocks and block bytes (a view) of each chunk."""
    stride = chunk_bytes(kind, cols, chunk_rows)
    size = block_bytes(kind, cols)
    views = []
    for chunk in range(num_chunks(rows, chunk_rows)):
        first = chunk * chunk_rows
        blocks = num_blocks(min(chunk_rows, rows - first))
        start = chunk * stride
        views.append((first, blocks, packed[start : start + blocks * size]))
    return views


def _by_block(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """(n, ...) -> (blocks, 16, ...), padded with zeros to whole row blocks."""
    padding = -len(rows) % BLOCK_ROWS
    if padding:
        rows = np.concatenate([rows, np.zeros((padding, *rows.shape[1:]), rows.dtype)])
    return rows.reshape(-1, BLOCK_ROWS, *rows.shape[1:])


def _nibbles(q: Bytes) -> Bytes:
    """(..., 32) values of 4 bits -> (..., 16) bytes."""
    nibbles: Bytes = q[..., :16] | (q[..., 16:] << np.uint8(4))
    return nibbles


def _to_half(values: Float32) -> Half:
    return np.ascontiguousarray(values).astype(np.float16)  # exact: they came from fp16
