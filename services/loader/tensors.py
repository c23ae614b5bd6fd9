"""Packs one tensor by row ranges, and says how far it moved. Knows no shard and no store.

Memory is bounded by `PIECE_VALUES`, whatever the tensor's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.formats.description import TensorView
from shared.kernel.chunks import matrix_bytes
from shared.manifest import Repacking, TensorEntry, TensorKind
from shared.quant.blocks import Int4Blocks, Int8Blocks, TensorNumbers, float32_of
from shared.quant.pack import pack_blocks

Bytes = npt.NDArray[np.uint8]

PIECE_VALUES = 1 << 19  # float32 copies of them stay in the outer caches
SAMPLED = 16  # the error is measured on one row of so many


@dataclass(frozen=True, slots=True)
class RepackingError:
    """What bringing a tensor into a kernel format did to it, over the rows that were looked at.

    `difference` and `size` are sums of squares: of what changed, and of the source's values.
    """

    tensor: str
    source_type: str
    kind: TensorKind
    difference: float
    size: float


def pack_tensor(view: TensorView, entry: TensorEntry, out: Bytes) -> RepackingError | None:
    """Write a tensor's bytes to `out`, uint8 (entry.num_bytes,). None when it is lossless.

    Raises `ModelError` for numbers that are not finite or that the format cannot hold.
    """
    difference = size = 0.0
    step = _rows_at_a_time(entry)
    end = 0
    for start in range(0, entry.rows, step):
        stop = min(start + step, entry.rows)
        numbers = view.read_rows(start, stop)
        end += _place(numbers, entry, out[end:])
        if not view.is_lossless:
            last = start + -(-(stop - start) // SAMPLED)
            source = view.read_float32(start, last)
            moved = float32_of(_first_rows(numbers, last - start))
            moved -= source
            difference += float(np.vdot(moved, moved))
            size += float(np.vdot(source, source))
        view.release(start, stop)
    assert end == entry.num_bytes, (entry, end)
    if view.is_lossless:
        return None
    return RepackingError(entry.name, view.source_type, view.kind, difference, size)


def summed(errors: Iterable[RepackingError]) -> tuple[Repacking, ...]:
    """The errors of all layers, by tensor name and types, in the order in which they come."""
    sums: dict[tuple[str, str, TensorKind], tuple[float, float]] = {}
    for error in errors:
        key = (error.tensor, error.source_type, error.kind)
        difference, size = sums.get(key, (0.0, 0.0))
        sums[key] = (difference + error.difference, size + error.size)
    return tuple(
        Repacking(*key, relative_rms=math.sqrt(difference / size) if size else 0.0)
        for key, (difference, size) in sums.items()
    )


def _rows_at_a_time(entry: TensorEntry) -> int:
    """Whole chunks, so that each piece is packed into its own part."""
    unit = entry.chunk_rows or 1
    return unit * max(1, PIECE_VALUES // (unit * entry.cols))


def _place(numbers: TensorNumbers, entry: TensorEntry, out: Bytes) -> int:
    """Write rows to the start of `out`; returns how many bytes they take."""
    if isinstance(numbers, Int4Blocks | Int8Blocks):
        kind, chunk_rows = entry.kind.value, entry.chunk_rows
        num_bytes = matrix_bytes(kind, len(numbers.scale), entry.cols, chunk_rows)
        pack_blocks(numbers, chunk_rows, out=out[:num_bytes])
        return num_bytes
    out[: numbers.nbytes].view("<f4")[:] = numbers.reshape(-1)
    return numbers.nbytes


def _first_rows(numbers: TensorNumbers, num_rows: int) -> TensorNumbers:
    match numbers:
        case Int4Blocks(scale, minimum, nibbles):
            return Int4Blocks(scale[:num_rows], minimum[:num_rows], nibbles[:num_rows])
        case Int8Blocks(scale, q):
            return Int8Blocks(scale[:num_rows], q[:num_rows])
        case values:
            return values[:num_rows].copy()
