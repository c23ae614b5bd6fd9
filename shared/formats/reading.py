"""Reads a stored tensor by row ranges: as float32, or in a format that the kernel multiplies with.

Types are GGUF's and safetensors' words; F32, F16 and BF16 are of both. Knows no container and no
architecture.

R rows, C cols, G = C / 32 groups.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from shared.errors import ModelError
from shared.formats.stored_tensor import StoredTensor
from shared.kernel.chunks import GROUP
from shared.manifest import TensorKind
from shared.quant.blocks import Int4Blocks, Int8Blocks, TensorNumbers
from shared.quant.nearest import quantize_int4_affine, quantize_int8

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

FLOAT_TYPES = ("F32", "F16", "BF16")
# What every type becomes unless something else is asked for; losslessly where that is possible,
# else in the format that is nearest for its bits. docs/quality.md has the measured errors.
KERNEL_KINDS: dict[str, TensorKind] = {
    "Q4_0": TensorKind.INT4,
    "Q4_1": TensorKind.INT4,
    "Q8_0": TensorKind.INT8,
} | dict.fromkeys(FLOAT_TYPES, TensorKind.INT8)
READ_TYPES = tuple(KERNEL_KINDS)
LOSSLESS = {
    ("Q4_0", TensorKind.INT4),
    ("Q4_1", TensorKind.INT4),
    ("Q8_0", TensorKind.INT8),
} | {(name, TensorKind.F32) for name in FLOAT_TYPES}

_FP16_MAX = 65504.0


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
    return (tensor.type_name, kind) in LOSSLESS


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
    if is_lossless(tensor, kind) and kind is not TensorKind.F32:
        return _native(tensor, start, stop)
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


def not_finite(tensor: StoredTensor) -> ModelError:
    return ModelError(
        f"{tensor.file.path.name}: tensor {tensor.name} holds NaN or infinity",
        remedy="the file is damaged or its quantisation failed; fetch another",
    )


def _native(tensor: StoredTensor, start: int, stop: int) -> TensorNumbers:
    """Blocks split into arrays of their own."""
    raw = tensor.row_bytes(start, stop)
    block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type_name]][1]
    blocks = raw.reshape(stop - start, tensor.num_cols // GROUP, block_bytes)
    scale = _halves(tensor, blocks, 0)
    if tensor.type_name == "Q8_0":
        return Int8Blocks(scale, np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8))
    if tensor.type_name == "Q4_1":
        low, nibbles = _halves(tensor, blocks, 2), blocks[:, :, 4:]
    else:
        exact = scale.astype(np.float32) * np.float32(-8)
        if bool((np.abs(exact) > _FP16_MAX).any()):
            raise ModelError(
                f"{tensor.file.path.name}: tensor {tensor.name} has a scale whose minimum "
                "overflows fp16",
                remedy="give the model in another type",
            )
        low, nibbles = exact.astype(np.float16), blocks[:, :, 2:]
    return Int4Blocks(scale, low, np.ascontiguousarray(nibbles))


def _halves(tensor: StoredTensor, blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """The fp16 at byte `at` of each block, (R, G)."""
    raw = np.ascontiguousarray(blocks[:, :, at : at + 2])
    halves = raw.view("<f2")[:, :, 0].astype(np.float16)
    if bool(((halves.view(np.uint16) & 0x7C00) == 0x7C00).any()):
        raise not_finite(tensor)
    return halves
