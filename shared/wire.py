"""What hidden states look like between layer groups: float32, or rounded to fewer bytes.

A layout declares its wire. The two shorter ones round at every hop, here and nowhere else, row by
row and with the same bits on every CPU; docs/arithmetic.md says how. Knows no message and no queue.

T rows, D hidden_size, G = D/32 groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel.chunks import GROUP
from shared.kernel.matrix import Float32
from shared.kernel.reference import MAX_HALF, STEPS, from_half, quantize_activations, to_half
from shared.topology import Wire

HIDDEN: Final = "hidden"
SCALE: Final = "hidden_scale"
_MAX_STEPS = STEPS[1]
# The largest scale that no q takes to infinity: 127 times it, rounded, is still a number.
MAX_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(_MAX_STEPS), np.float32(0))

Tensors = Mapping[str, npt.NDArray[Any]]
# Type of each tensor that carries hidden states, and values a column.
_FORMS: dict[Wire, dict[str, tuple[np.dtype[Any], int]]] = {
    Wire.F32: {HIDDEN: (np.dtype(np.float32), 1)},
    Wire.F16: {HIDDEN: (np.dtype(np.float16), 1)},
    Wire.I8: {HIDDEN: (np.dtype(np.int8), 1), SCALE: (np.dtype(np.float32), GROUP)},
}


def tensor_names(wire: Wire) -> tuple[str, ...]:
    """The tensors that carry hidden states."""
    return tuple(_FORMS[wire])


def row_bytes(wire: Wire, hidden_size: int) -> int:
    """Bytes of the hidden state of one position at a hop."""
    return sum(dtype.itemsize * hidden_size // each for dtype, each in _FORMS[wire].values())


def encode_hidden(hidden: Float32, wire: Wire) -> dict[str, npt.NDArray[Any]]:
    """(T, D) as the named tensors of a wire.

    Raises `KernelError` naming the first row with a value that the wire cannot hold; nothing is
    clamped.
    """
    match wire:
        case Wire.F32:
            return {HIDDEN: hidden}
        case Wire.F16:
            _require_at_most(MAX_HALF, np.abs(hidden), wire)
            return {HIDDEN: to_half(hidden).view(np.float16)}
        case Wire.I8:
            rows = quantize_activations(hidden)
            _require_at_most(MAX_SCALE, rows.d, wire)
            return {HIDDEN: rows.q.astype(np.int8).reshape(hidden.shape), SCALE: rows.d}


def decode_hidden(tensors: Tensors, wire: Wire) -> Float32:
    """(T, D) from the named tensors of a wire, in which `hidden_problem` finds nothing."""
    rows = tensors[HIDDEN]
    match wire:
        case Wire.F32:
            return rows
        case Wire.F16:
            return from_half(rows.view(np.uint16))
        case Wire.I8:
            groups = rows.reshape(len(rows), -1, GROUP).astype(np.float32)  # (T, G, 32)
            return (groups * tensors[SCALE][:, :, None]).reshape(rows.shape)


def over_a_hop(hidden: Float32, wire: Wire) -> Float32:
    """What of hidden states (T, D) arrives at the next group."""
    return decode_hidden(encode_hidden(hidden, wire), wire)


def hidden_problem(tensors: Tensors, wire: Wire, hidden_size: int) -> str:
    """Why tensors are no hidden states of this wire and size; "" if they are."""
    for name, (dtype, each) in _FORMS[wire].items():
        cols = hidden_size // each
        tensor = tensors.get(name)
        if tensor is None:
            return f"it carries no tensor {name!r}, which the {wire} wire has"
        if tensor.ndim != 2 or tensor.shape[1] != cols or tensor.dtype != dtype:
            return (
                f"{name} must be {dtype} (T, {cols}) on the {wire} wire, got {tensor.dtype} "
                f"{tensor.shape}"
            )
    if wire is Wire.I8:
        if tensors[HIDDEN].min() < -_MAX_STEPS:
            return f"hidden must be in {-_MAX_STEPS}..{_MAX_STEPS}"
        scale = tensors[SCALE]
        return "" if ((scale >= 0) & (scale <= MAX_SCALE)).all() else "hidden_scale is no scale"
    return "" if np.isfinite(tensors[HIDDEN]).all() else "hidden holds a value that is not finite"


def _require_at_most(limit: np.float32, sizes: Float32, wire: Wire) -> None:
    fits = (sizes <= limit).all(axis=1)  # false for NaN too
    if not fits.all():
        row = int(np.argmin(fits))
        raise KernelError(
            f"the {wire} wire cannot hold a hidden state of batch row {row}: {sizes[row].max():g} "
            f"is over {limit:g}; load the model with --wire f32"
        )
