"""Reads a stored tensor by row ranges: as float32, or in a format that the kernel multiplies with.

Types are GGUF's and safetensors' words; F32, F16 and BF16 are of both. Knows no container and no
architecture.

R rows, C cols, G = C / 32 groups.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from shared.errors import ModelError
from shared.formats.gguf_blocks import DIRECT, not_finite
from shared.formats.stored_tensor import StoredTensor
from shared.manifest import TensorKind
from shared.quant.blocks import TensorNumbers
from shared.quant.nearest import quantize_int4_affine, quantize_int8

Float32 = npt.NDArray[np.float32]

FLOAT_TYPES = ("F32", "F16", "BF16")
# What every type becomes unless something else is asked for: losslessly where that is possible,
# else int4 where it adds less than 3 % to the error that the type itself has, else int8. What was
# measured is in docs/formats.md.
KERNEL_KINDS: dict[str, TensorKind] = {
    "Q4_0": TensorKind.INT4,
    "Q4_1": TensorKind.INT4,
    "Q5_0": TensorKind.INT8,
    "Q5_1": TensorKind.INT8,
    "Q8_0": TensorKind.INT8,
    "Q2_K": TensorKind.INT4,
    "Q3_K": TensorKind.INT8,
    "Q4_K": TensorKind.INT4,
    "Q5_K": TensorKind.INT8,
    "Q6_K": TensorKind.INT8,
    "IQ4_NL": TensorKind.INT8,
    "F16": TensorKind.INT8,
    "BF16": TensorKind.INT8,
    "F32": TensorKind.INT8,
}
READ_TYPES = tuple(KERNEL_KINDS)
LOSSLESS = {
    ("Q4_0", TensorKind.INT4),
    ("Q4_1", TensorKind.INT4),
    ("Q5_0", TensorKind.INT8),  # 32 values of -16..15 under one fp16 scale
    ("Q8_0", TensorKind.INT8),
    ("IQ4_NL", TensorKind.INT8),  # 32 values of a table of int8 under one fp16 scale
}


def kernel_kind(tensor: StoredTensor) -> TensorKind:
    """The format that a matrix of this type is kept in. Raises `ModelError` for unknown types."""
    kind = KERNEL_KINDS.get(tensor.type_name)
    if kind is None:
        raise ModelError(
            f"{tensor.file.path.name}: tensor {tensor.name} has type {tensor.type_name}; "
            f"read are {', '.join(READ_TYPES)}",
            remedy="give the model in one of these types",
        )
    return kind


def is_lossless(tensor: StoredTensor, kind: TensorKind) -> bool:
    """Whether a kernel format holds just the numbers of the file."""
    return kind is TensorKind.F32 or (tensor.type_name, kind) in LOSSLESS


def read_float32(tensor: StoredTensor, start: int, stop: int) -> Float32:
    """Rows start..stop as float32 (stop - start, C), a copy. A vector is one row.

    Raises `ModelError` for a type that is not read, and for NaN and infinity.
    """
    kernel_kind(tensor)
    raw = tensor.row_bytes(start, stop)
    with np.errstate(over="ignore", invalid="ignore"):
        match tensor.type_name:
            case "F32":
                values = raw.view("<f4").astype(np.float32)
            case "F16":
                values = raw.view("<f2").astype(np.float32)
            case "BF16":
                values = bf16_to_float32(raw.view("<u2"))
            case name:
                values = dequantize(raw, GGMLQuantizationType[name]).astype(np.float32, copy=False)
        # A sum over finite values may overflow: then each is looked at.
        is_finite = bool(np.isfinite(values.sum(dtype=np.float32)) or np.isfinite(values).all())
    if not is_finite:
        raise not_finite(tensor)
    return values


def read_rows(tensor: StoredTensor, kind: TensorKind, start: int, stop: int) -> TensorNumbers:
    """Rows start..stop in a kernel format: as they are where they fit, else the nearest values.

    Raises `ModelError` as `read_float32` does, and for a scale that fp16 cannot hold.
    """
    if direct := DIRECT.get((tensor.type_name, kind)):
        return direct(tensor, start, stop)
    values = read_float32(tensor, start, stop)
    if kind is TensorKind.F32:
        return values
    try:
        return quantize_int8(values) if kind is TensorKind.INT8 else quantize_int4_affine(values)
    except ModelError as error:
        raise ModelError(
            f"{tensor.file.path.name}: tensor {tensor.name} cannot be kept as {kind}: {error}",
            remedy="its values are out of fp16's range; the file may be damaged",
        ) from error


def bf16_to_float32(bits: npt.NDArray[np.uint16]) -> Float32:
    """The upper half of a binary32 each, exactly."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)
