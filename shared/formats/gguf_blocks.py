"""GGUF's blocks whose groups of 32 are groups of the kernel's too: taken apart, never dequantised.

Each function gives rows start..stop of a stored tensor, and raises `ModelError` for a scale or
minimum that is not finite or that fp16 cannot hold. Knows no container.

R rows, C cols, G = C / 32 groups. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.formats.stored_tensor import StoredTensor
from shared.kernel.chunks import GROUP
from shared.manifest import TensorKind
from shared.quant.blocks import Int4Blocks, Int8Blocks, TensorNumbers

Bytes = npt.NDArray[np.uint8]
Half = npt.NDArray[np.float16]
Float32 = npt.NDArray[np.float32]

Reader = Callable[[StoredTensor, int, int], TensorNumbers]

SUPER_GROUPS = 8  # groups in a superblock of 256
_Q4_K_BYTES = 144
_IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def read_q4_0(tensor: StoredTensor, start: int, stop: int) -> Int4Blocks:
    """w = d * (q - 8): min = -8 * d, exactly unless it leaves fp16."""
    blocks = _blocks(tensor, start, stop, 18)
    scale = _halves(tensor, blocks, 0)
    low = _to_half(tensor, scale.astype(np.float32) * np.float32(-8))
    return Int4Blocks(scale, low, np.ascontiguousarray(blocks[:, :, 2:]))


def read_q4_1(tensor: StoredTensor, start: int, stop: int) -> Int4Blocks:
    """w = d * q + m."""
    blocks = _blocks(tensor, start, stop, 20)
    scale, low = _halves(tensor, blocks, 0), _halves(tensor, blocks, 2)
    return Int4Blocks(scale, low, np.ascontiguousarray(blocks[:, :, 4:]))


def read_q8_0(tensor: StoredTensor, start: int, stop: int) -> Int8Blocks:
    """w = d * q."""
    blocks = _blocks(tensor, start, stop, 34)
    return Int8Blocks(
        _halves(tensor, blocks, 0), np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8)
    )


def read_q5_0(tensor: StoredTensor, start: int, stop: int) -> Int8Blocks:
    """w = d * (q - 16). The fifth bit of value j is bit j of a word before the nibbles."""
    blocks = _blocks(tensor, start, stop, 22)
    fifth = np.unpackbits(blocks[:, :, 2:6], axis=2, bitorder="little")  # (R, G, 32)
    q = _from_nibbles(blocks[:, :, 6:])
    q |= fifth << np.uint8(4)
    q -= np.uint8(16)  # wraps round, as int8 reads it
    return Int8Blocks(_halves(tensor, blocks, 0), q.view(np.int8))


def read_iq4_nl(tensor: StoredTensor, start: int, stop: int) -> Int8Blocks:
    """w = d * table[q]."""
    blocks = _blocks(tensor, start, stop, 18)
    return Int8Blocks(_halves(tensor, blocks, 0), _IQ4_NL_VALUES[_from_nibbles(blocks[:, :, 2:])])


def read_q4_k(tensor: StoredTensor, start: int, stop: int) -> Int4Blocks:
    """w = d * s * q - dmin * m, s and m of 6 bits: exact but for rounding both products to fp16."""
    rows = stop - start
    blocks = tensor.row_bytes(start, stop).reshape(rows, -1, _Q4_K_BYTES)  # (R, C / 256, 144)
    d, d_min = (_halves(tensor, blocks, at).astype(np.float32)[..., None] for at in (0, 2))
    s, m = _six_bits(blocks[:, :, 4:16])
    scale = _to_half(tensor, d * s)
    low = _to_half(tensor, -d_min * m)
    # Of each 32 bytes the low halves are one group and the high halves the next.
    quads = blocks[:, :, 16:].reshape(rows, -1, SUPER_GROUPS // 2, 2, 16)
    first, second = quads[:, :, :, 0], quads[:, :, :, 1]
    nibbles = np.empty((rows, quads.shape[1], SUPER_GROUPS // 2, 2, 16), np.uint8)
    nibbles[:, :, :, 0] = (first & np.uint8(15)) | (second << np.uint8(4))
    nibbles[:, :, :, 1] = (first >> np.uint8(4)) | (second & np.uint8(0xF0))
    return Int4Blocks(scale.reshape(rows, -1), low.reshape(rows, -1), nibbles.reshape(rows, -1, 16))


DIRECT: dict[tuple[str, TensorKind], Reader] = {
    ("Q4_0", TensorKind.INT4): read_q4_0,
    ("Q4_1", TensorKind.INT4): read_q4_1,
    ("Q4_K", TensorKind.INT4): read_q4_k,
    ("Q5_0", TensorKind.INT8): read_q5_0,
    ("Q8_0", TensorKind.INT8): read_q8_0,
    ("IQ4_NL", TensorKind.INT8): read_iq4_nl,
}


def not_finite(tensor: StoredTensor) -> ModelError:
    return ModelError(
        f"{tensor.file.path.name}: tensor {tensor.name} holds NaN or infinity",
        remedy="the file is damaged or its quantisation failed; fetch another",
    )


def _blocks(tensor: StoredTensor, start: int, stop: int, block_bytes: int) -> Bytes:
    """(R, G, bytes of a block)"""
    return tensor.row_bytes(start, stop).reshape(stop - start, -1, block_bytes)


def _halves(tensor: StoredTensor, blocks: Bytes, at: int) -> Half:
    """The fp16 at byte `at` of each block, (R, blocks of a row)."""
    raw = np.ascontiguousarray(blocks[:, :, at : at + 2])
    halves: Half = raw.view("<f2")[:, :, 0].astype(np.float16)
    if bool(((halves.view(np.uint16) & 0x7C00) == 0x7C00).any()):
        raise not_finite(tensor)
    return halves


def _to_half(tensor: StoredTensor, values: Float32) -> Half:
    with np.errstate(over="ignore"):
        halves: Half = values.astype(np.float16)
    if not bool(np.isfinite(halves).all()):
        raise ModelError(
            f"{tensor.file.path.name}: tensor {tensor.name} has a scale or a minimum that "
            "overflows fp16",
            remedy="the file may be damaged; give the model in another type",
        )
    return halves


def _from_nibbles(nibbles: Bytes) -> Bytes:
    """(R, G, 16) bytes as (R, G, 32) values of 0..15: low halves first."""
    q = np.empty((*nibbles.shape[:2], GROUP), np.uint8)
    np.bitwise_and(nibbles, np.uint8(15), out=q[:, :, : GROUP // 2])
    np.right_shift(nibbles, np.uint8(4), out=q[:, :, GROUP // 2 :])
    return q


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and minima of the 8 groups of each superblock, from their 12 bytes: (R, blocks, 8)."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    six, four, two = np.uint8(63), np.uint8(4), np.uint8(2)
    s = np.concatenate([low & six, (high & np.uint8(15)) | ((low >> two) & np.uint8(48))], axis=2)
    m = np.concatenate([mid & six, (high >> four) | ((mid >> two) & np.uint8(48))], axis=2)
    return s, m
