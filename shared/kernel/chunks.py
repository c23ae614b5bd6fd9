"""Owns the geometry of packed matrices: row blocks, chunks and their bytes. Knows no values.

A chunk is the unit that would be moved by DMA into a small local store, twice (one is computed
while the next arrives), beside the activations it is multiplied with and the outputs it makes.
docs/arithmetic.md draws the layout.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError, KernelError

ChunkKind = Literal["int4", "int8"]

GROUP = 32  # inputs that share one scale
BLOCK_ROWS = 16  # outputs that are interleaved in a row block
INT4_GROUP_BYTES = 320  # 16 scales, 16 mins, 16 x 32 nibbles
INT8_GROUP_BYTES = 512  # 16 x 32 bytes; the scales of a block lie before its groups
CHUNK_ALIGN = 128  # what a Cell's DMA likes best, and two cache lines elsewhere
DEFAULT_LOCAL_STORE_BYTES = 256 * 1024
MAX_CHUNK_BYTES = 96 * 1024  # twice that leaves 64 KiB of the default store to code and values
WEIGHT_ALIGN = 64  # one AVX-512 vector, one cache line


def align_up(num_bytes: int, alignment: int) -> int:
    """The least multiple of `alignment` that is not below `num_bytes`."""
    return -(-num_bytes // alignment) * alignment


def aligned_zeros(
    shape: int | tuple[int, ...], dtype: npt.DTypeLike = np.uint8
) -> npt.NDArray[Any]:
    """A zeroed C-contiguous array whose first byte is aligned to 64, as the kernel likes weights
    and KV pages."""
    wanted = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, int) else shape
    num_bytes = int(np.prod(sizes, dtype=np.int64)) * wanted.itemsize
    raw = np.zeros(num_bytes + WEIGHT_ALIGN, np.uint8)
    start = -raw.ctypes.data % WEIGHT_ALIGN
    return raw[start : start + num_bytes].view(wanted).reshape(sizes)


def num_groups(cols: int) -> int:
    """Groups of 32 in a row. Raises `KernelError` unless cols is a positive multiple of 32."""
    if cols <= 0 or cols % GROUP:
        raise KernelError(f"cols must be a positive multiple of {GROUP}, got {cols}")
    return cols // GROUP


def int8_scale_bytes(cols: int) -> int:
    """Bytes of the scales that open an int8 row block, padded to 64."""
    return align_up(num_groups(cols) * BLOCK_ROWS * 2, 64)


def block_bytes(kind: str, cols: int) -> int:
    """Bytes of one row block of 16 outputs. Raises `KernelError` for a kind that has no chunks."""
    if kind == "int4":
        return num_groups(cols) * INT4_GROUP_BYTES
    if kind == "int8":
        return int8_scale_bytes(cols) + num_groups(cols) * INT8_GROUP_BYTES
    raise KernelError(f"kind must be int4 or int8, got {kind!r}")


def num_blocks(rows: int) -> int:
    """Row blocks of a matrix; the last may be padded."""
    return -(-rows // BLOCK_ROWS)


def chunk_bytes(kind: str, cols: int, chunk_rows: int) -> int:
    """Bytes of a chunk of `chunk_rows` outputs, padded to 128."""
    return align_up(num_blocks(chunk_rows) * block_bytes(kind, cols), CHUNK_ALIGN)


def num_chunks(rows: int, chunk_rows: int) -> int:
    """Chunks of a matrix. Raises `KernelError` unless chunk_rows is a positive multiple of 16."""
    if rows <= 0:
        raise KernelError(f"rows must be positive, got {rows}")
    if chunk_rows <= 0 or chunk_rows % BLOCK_ROWS:
        raise KernelError(
            f"chunk_rows must be a positive multiple of {BLOCK_ROWS}, got {chunk_rows}"
        )
    return -(-rows // chunk_rows)


def matrix_bytes(kind: str, rows: int, cols: int, chunk_rows: int) -> int:
    """Bytes of a whole packed matrix. Its last chunk holds only the blocks that are left."""
    full = num_chunks(rows, chunk_rows) - 1
    last_rows = rows - full * chunk_rows
    return full * chunk_bytes(kind, cols, chunk_rows) + chunk_bytes(kind, cols, last_rows)


def local_store_need(kind: str, cols: int, chunk_rows: int) -> int:
    """Bytes that a chunk needs in a local store: itself twice, one row of quantised activations
    (int8, and two binary32 a group) and its outputs in binary32."""
    return 2 * chunk_bytes(kind, cols, chunk_rows) + _beside_weights(cols, chunk_rows)


def streamed_need(kind: str, cols: int) -> int:
    """Bytes that a single row block needs in a local store when it passes through group by group:
    two groups at a time, an int8 block's scales, and what `local_store_need` counts beside."""
    group, scales = INT4_GROUP_BYTES, 0
    if kind == "int8":
        group, scales = INT8_GROUP_BYTES, align_up(int8_scale_bytes(cols), CHUNK_ALIGN)
    part = align_up(group, CHUNK_ALIGN)
    return scales + 2 * part + _beside_weights(cols, BLOCK_ROWS)


def choose_chunk_rows(
    kind: str, rows: int, cols: int, *, local_store_bytes: int = DEFAULT_LOCAL_STORE_BYTES
) -> int:
    """The largest chunk, in rows, that fits the local store twice and stays within 96 KiB.

    One block is a chunk even when it is larger than that: its groups lie in the order in which they
    are multiplied, so it can pass through the store in parts. Raises `ConfigError` when not even
    that fits.
    """
    if rows <= 0:
        raise KernelError(f"rows must be positive, got {rows}")
    if local_store_need(kind, cols, BLOCK_ROWS) > local_store_bytes:
        least = streamed_need(kind, cols)
        if least > local_store_bytes:
            raise ConfigError(
                f"local_store_bytes {local_store_bytes} is too small: 16 rows of an {kind} matrix "
                f"of {cols} columns need {least}",
                remedy=f"set local_store_bytes to {least} or more",
            )
        return BLOCK_ROWS
    blocks = min(num_blocks(rows), max(1, MAX_CHUNK_BYTES // block_bytes(kind, cols)))
    while local_store_need(kind, cols, blocks * BLOCK_ROWS) > local_store_bytes:
        blocks -= 1
    return blocks * BLOCK_ROWS


def _beside_weights(cols: int, chunk_rows: int) -> int:
    activations = align_up(cols + 8 * num_groups(cols), CHUNK_ALIGN)
    return activations + align_up(4 * chunk_rows, CHUNK_ALIGN)
