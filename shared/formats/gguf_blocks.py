"""GGUF's blocks whose groups of 32 are groups of the kernel's too: taken apart, never dequantised.

Each function gives rows start..stop of a stored tensor, and raises `ModelError` for a scale or
minimum that is not finite or that fp16 cannot hold. What needs no change is a read-only view of the
file: a copy would take as long as packing it. Knows no container.

R rows, C cols, G = C / 32 groups. Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.formats.stored_tensor import StoredTensor
from shared.manifest import TensorKind
from shared.quant.blocks import Int4Blocks, Int8Blocks, TensorNumbers

Bytes = npt.NDArray[np.uint8]
Half = npt.NDArray[np.float16]
Float32 = npt.NDArray[np.float32]

Reader = Callable[[StoredTensor, int, int], TensorNumbers]

_Q4_K_BYTES = 144  # of a superblock of 8 groups
_LOW_HALVES = np.uint64(0x0F0F0F0F0F0F0F0F)
_IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)


def read_q4_0(tensor: StoredTensor, start: int, stop: int) -> Int4Blocks:
    """w = d * (q - 8): min = -8 * d, exactly unless it leaves fp16."""
    blocks = _blocks(tensor, start, stop, 18)
    scale = _halves(tensor, blocks, 0)
    low = _to_half(tensor, scale.astype(np.float32) * np.float32(-8))
    return Int4Blocks(scale, low, blocks[:, :, 2:])


def read_q4_1(tensor: StoredTensor, start: int, stop: int) -> Int4Blocks:
    """w = d * q + m."""
    blocks = _blocks(tensor, start, stop, 20)
    scale, low = _halves(tensor, blocks, 0), _halves(tensor, blocks, 2)
    return Int4Blocks(scale, low, blocks[:, :, 4:])


def read_q8_0(tensor: StoredTensor, start: int, stop: int) -> Int8Blocks:
    """w = d * q."""
    blocks = _blocks(tensor, start, stop, 34)
    return Int8Blocks(_halves(tensor, blocks, 0), blocks[:, :, 2:].view(np.int8))


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
    d, d_min = (np.repeat(_halves(tensor, blocks, at).astype(np.float32), 8, 1) for at in (0, 2))
    s, m = _six_bits(blocks[:, :, 4:16])
    scale = _to_half(tensor, d * s.reshape(rows, -1))
    low = _to_half(tensor, -d_min * m.reshape(rows, -1))
    # Of each 32 bytes the low halves are one group and the high halves the next. Words of 8 bytes,
    # since NumPy is slow at many short runs.
    words = np.ascontiguousarray(blocks[:, :, 16:]).view(np.uint64).reshape(-1, 4)
    first, second = words & _LOW_HALVES, words & ~_LOW_HALVES
    second >>= np.uint64(4)
    nibbles = np.empty((len(words), 4), np.uint64)
    for group, half in enumerate((first, second)):
        for word in range(2):
            np.left_shift(half[:, 2 + word], np.uint64(4), out=nibbles[:, 2 * group + word])
            nibbles[:, 2 * group + word] |= half[:, word]
    return Int4Blocks(scale, low, nibbles.view(np.uint8).reshape(rows, -1, 16))


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
    rows, groups = nibbles.shape[:2]
    words = np.ascontiguousarray(nibbles).view(np.uint64)
    q = np.empty((rows, groups, 4), np.uint64)
    q[:, :, :2] = words & _LOW_HALVES
    words = words >> np.uint64(4)
    q[:, :, 2:] = words & _LOW_HALVES
    return q.view(np.uint8)


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """Scales and minima of the 8 groups of each superblock, from their 12 bytes: (R, blocks, 8)."""
    words = np.ascontiguousarray(packed).view(np.uint32)  # of 4 groups each, one a byte
    low, mid, high = words[..., 0], words[..., 1], words[..., 2]
    six, four, top = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    s, m = (np.empty((*low.shape, 2), np.uint32) for _ in range(2))
    s[..., 0], m[..., 0] = low & six, mid & six
    s[..., 1] = (high & four) | ((low >> np.uint32(2)) & top)
    m[..., 1] = ((high >> np.uint32(4)) & four) | ((mid >> np.uint32(2)) & top)
    return s.view(np.uint8), m.view(np.uint8)
