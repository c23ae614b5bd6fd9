"""Refuses arrays that C would read as something they are not: another type, shape or layout.

A pointer carries none of the three, so a kernel that trusts its caller computes nonsense, or dies.
Each check costs a fraction of a microsecond, a call of the kernel hundreds.

R rows of the batch, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel.weights import GroupShape, GroupWeights, PagedSlice

FLOAT32, INT32, UINT16, UINTP = map(np.dtype, (np.float32, np.int32, np.uint16, np.uintp))
PAGE_POSITIONS = 16
MAX_INT32 = 2**31 - 1
OPTIONAL_VECTORS = (  # of `LayerWeights`, and of C's cp_layer
    "q_bias",
    "k_bias",
    "v_bias",
    "q_norm",
    "k_norm",
    "attention_out_norm",
    "mlp_out_norm",
)


def check_array(
    name: str,
    array: npt.NDArray[Any],
    dtype: np.dtype[Any],
    shape: tuple[int | None, ...],
    *,
    written: bool = False,
) -> None:
    """Raise `KernelError` unless the array is of that type and shape (None: any size), C-contiguous
    and, if it is to be written, writable."""
    if not isinstance(array, np.ndarray):
        raise KernelError(f"{name} must be an array, got {type(array).__name__}")
    if array.dtype != dtype or (array.shape != shape and not _matches(array.shape, shape)):
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise KernelError(f"{name} must be {dtype} ({sizes}), got {array.dtype} {array.shape}")
    if not array.flags.c_contiguous:
        raise KernelError(f"{name} must be contiguous, got strides {array.strides}")
    if written and not array.flags.writeable:
        raise KernelError(f"{name} must be writable")


def _matches(sizes: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(sizes) == len(shape) and all(
        want in (None, size) for want, size in zip(shape, sizes, strict=True)
    )


def check_weights(weights: GroupWeights) -> None:
    """Vectors and tables of a group. Matrices check themselves, and C that they fit the shape."""
    shape = weights.shape
    sizes = (shape.hidden_size, shape.intermediate_size, shape.num_heads, shape.num_kv_heads)
    if not all(0 < size <= MAX_INT32 for size in (*sizes, shape.head_dim)):
        raise KernelError(f"sizes of a layer group must be positive, got {shape}")
    tables = (shape.num_positions, shape.head_dim // 2)
    for number, layer in enumerate(weights.layers):
        hidden = (shape.hidden_size,)
        check_array(f"input_norm of layer {number}", layer.input_norm, FLOAT32, hidden)
        check_array(f"post_norm of layer {number}", layer.post_norm, FLOAT32, hidden)
        for name, size in _optional_sizes(shape).items():
            if (vector := getattr(layer, name)) is not None:
                check_array(f"{name} of layer {number}", vector, FLOAT32, (size,))
        if layer.rope is not None:
            check_array("rope_cos", layer.rope.cos, FLOAT32, tables)
            check_array("rope_sin", layer.rope.sin, FLOAT32, tables)
    if weights.final_norm is not None:
        check_array("final_norm", weights.final_norm, FLOAT32, (shape.hidden_size,))
    for name, matrix in (("embedding", weights.embedding), ("head", weights.head)):
        if matrix is not None and matrix.cols != shape.hidden_size:
            raise KernelError(f"the {name} has {matrix.cols} columns, not {shape.hidden_size}")


def _optional_sizes(shape: GroupShape) -> dict[str, int]:
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, head = shape.hidden_size, shape.head_dim
    return dict(zip(OPTIONAL_VECTORS, (q, kv, kv, head, head, hidden, hidden), strict=True))


def check_slices(shape: GroupShape, num_layers: int, slices: Sequence[PagedSlice]) -> None:
    """The pages that each slice writes, and the addresses of all.

    Pages before those were checked when they were written: a step writes one page, a long answer
    has hundreds.
    """
    page = (num_layers, shape.num_kv_heads, 2, PAGE_POSITIONS, shape.head_dim)
    for part in slices:
        check_array("page addresses", part.addresses, UINTP, (len(part.pages),))
        end = part.start_position + part.num_rows
        if part.start_position < 0 or part.num_rows <= 0 or end > len(part.pages) * PAGE_POSITIONS:
            raise KernelError(
                f"positions {part.start_position}..{end} lie outside the {len(part.pages)} pages"
            )
        first = part.start_position // PAGE_POSITIONS
        for number in range(first, -(-end // PAGE_POSITIONS)):
            check_array("a KV page", part.pages[number], UINT16, page, written=True)
            if part.pages[number].ctypes.data != int(part.addresses[number]):
                raise KernelError(f"KV page {number} does not lie at its address")
