"""Defines the kernel's numbers, in NumPy: the C kernel must equal these functions bit for bit.

docs/arithmetic.md is the contract in words. Only element-wise operations and sums in an explicit
order are used, since NumPy's own sums depend on the CPU. A product of small integers may go through
BLAS: it is exact in any order. Attention is in reference_attention.

R rows of the batch, C cols, G = C/32 groups, D hidden_size, H heads, hd head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel.chunks import GROUP, num_groups
from shared.kernel.matrix import Float32, PackedMatrix

F = np.float32
MAX_HALF = F(65504.0)
MIN_AMAX = F(2.0**-100)  # below it a group counts as zero, so that 127 / amax stays finite

LOG2E = F(1.44269504)
LN2_HI = F(0.693359375)
LN2_LO = F(-2.12194440e-4)
EXP_MIN, EXP_MAX = F(-87.0), F(88.0)
STEPS = {1: 127, 2: 127 * 254}  # the largest |q| of activations of one and of two int8 terms
# 2 sqrt(2/pi) and that times 0.044715: gelu(x) = x * sigmoid(x * (GELU_LINEAR + GELU_CUBIC * x^2))
GELU_LINEAR, GELU_CUBIC = F(1.5957691216), F(0.0713548162726)
TANH_SMALL = F(0.5)  # below it a series, above it a quotient
TANH_SERIES = tuple(  # of z = x^2, innermost first: tanh x = x + x * z * series
    F(over) / F(under)
    for over, under in (
        (-929569, 638512875), (21844, 6081075), (-1382, 155925), (62, 2835), (-17, 315), (2, 15),
        (-1, 3),
    )
)  # fmt: skip
EXP_COEFFICIENTS = tuple(F(1) / F(k) for k in (720, 120, 24, 6, 2, 1, 1))  # 1/k!, innermost first


@dataclass(frozen=True)
class Activations:
    """Quantised rows, made once for all matrices that share an input."""

    q: Float32  # (R, G, 32), whole numbers in -127..127 or -32258..32258
    d: Float32  # (R, G)
    s: Float32  # (R, G), sums of q: whole numbers below 2^20


def require_finite(x: Float32) -> None:
    """Raise `KernelError` naming the first row of (R, ...) that holds infinity or NaN."""
    finite = np.isfinite(x).reshape(len(x), -1).all(axis=1)
    if not finite.all():
        raise KernelError(f"a value is not finite in batch row {int(np.argmin(finite))}")


def quantize_activations(x: Float32, terms: int = 1) -> Activations:
    """Quantise (R, C) in groups of 32 to whole numbers of 1 or 2 int8 terms.

    Raises `KernelError` for a value not finite.
    """
    steps = STEPS[terms]
    require_finite(x)
    groups = x.reshape(len(x), num_groups(x.shape[1]), GROUP)
    amax = np.abs(groups).max(axis=2)  # (R, G)
    zero = amax < MIN_AMAX
    safe = np.where(zero, F(1), amax)
    d = np.where(zero, F(0), safe / F(steps))
    q = np.rint(groups * (F(steps) / safe)[:, :, None])
    q = np.where(zero[:, :, None], F(0), np.minimum(np.maximum(q, F(-steps)), F(steps)))
    return Activations(q, d, q.sum(axis=2, dtype=np.float32))  # whole numbers: any order is exact


def matmul(matrix: PackedMatrix, x: Activations) -> Float32:
    """(R, rows): each output is A + B, sums over the groups in ascending order."""
    w = matrix.unpacked
    a = np.zeros((len(x.d), matrix.rows), np.float32)
    b = np.zeros_like(a)
    ds = x.d * x.s  # (R, G)
    with np.errstate(over="ignore", invalid="ignore"):
        for g in range(num_groups(matrix.cols)):
            # Whole numbers below 2^27: exact in binary64, then rounded once to binary32.
            dot = x.q[:, g].astype(np.float64) @ w.q[g].astype(np.float64).T
            a += (w.scale[g] * x.d[:, g, None]) * dot.astype(np.float32)
            if w.min is not None:
                b += w.min[g] * ds[:, g, None]
        return a if w.min is None else a + b


def sum8(x: Float32) -> Float32:
    """Sum of the last axis, a multiple of 8 long, in 8 lanes and then a tree."""
    lanes = np.zeros((*x.shape[:-1], 8), np.float32)
    for start in range(0, x.shape[-1], 8):
        lanes = lanes + x[..., start : start + 8]
    fours = lanes[..., :4] + lanes[..., 4:]
    twos = fours[..., :2] + fours[..., 2:]
    total: Float32 = twos[..., 0] + twos[..., 1]
    return total


def dot8(x: Float32, y: Float32) -> Float32:
    """sum8 of the rounded products of the last axes."""
    return sum8(x * y)


def exp(x: Float32) -> Float32:
    """e^x by a fixed polynomial, x clamped to -87..88; relative error below 3e-7."""
    x = np.minimum(np.maximum(x, EXP_MIN), EXP_MAX)
    n = np.rint(x * LOG2E)
    r = x - n * LN2_HI
    r = r - n * LN2_LO
    p = np.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = p * r + coefficient
    power = ((n.astype(np.int32) + 127) << 23).view(np.float32)  # 2^n
    result: Float32 = p * power
    return result


def exp_or_zero(x: Float32) -> Float32:
    """exp for softmax: 0 below -87."""
    return np.where(x < EXP_MIN, F(0), exp(x))


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """Normalise the last axis of (R, ..., D). Raises `KernelError` when a mean square is not
    finite: it would come out as zeros."""
    with np.errstate(over="ignore", invalid="ignore"):
        mean_square = dot8(x, x) / F(x.shape[-1])  # (R, ...)
        require_finite(mean_square)
        inv = F(1) / np.sqrt(mean_square + F(eps))
        out: Float32 = (x * inv[..., None]) * weight
        return out


def rope(x: Float32, cos: Float32, sin: Float32, *, half_pairing: bool) -> Float32:
    """Rotate the pairs of x (R, heads, hd) by cos, sin (R, hd/2) of each row's position."""
    half = x.shape[-1] // 2
    first = slice(0, half) if half_pairing else slice(0, None, 2)
    second = slice(half, None) if half_pairing else slice(1, None, 2)
    a, b = x[..., first], x[..., second]
    c, s = cos[:, None, :], sin[:, None, :]
    out = np.empty_like(x)
    with np.errstate(over="ignore", invalid="ignore"):
        out[..., first] = a * c - b * s
        out[..., second] = a * s + b * c
    return out


def silu(x: Float32) -> Float32:
    """x / (1 + e^-x)."""
    return x / (F(1) + exp(-x))


def gelu_tanh(x: Float32) -> Float32:
    """GELU by tanh, as x * sigmoid(2u): 0.5 * (1 + tanh u) is just that."""
    with np.errstate(over="ignore"):  # an infinite exponent is clamped by exp
        exponent = x * (GELU_LINEAR + GELU_CUBIC * (x * x))
    return x / (F(1) + exp(-exponent))


def tanh(x: Float32) -> Float32:
    """A series below 1/2, (1 - e) / (1 + e) with e = exp(-2|x|) from there; relative error below
    3e-7. x holds no NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        z = x * x
        p = np.full_like(x, TANH_SERIES[0])
        for coefficient in TANH_SERIES[1:]:
            p = p * z + coefficient
        small = x + x * (z * p)
        magnitude = np.abs(x)
        e = exp(F(-2) * magnitude)
        large = np.copysign((F(1) - e) / (F(1) + e), x)
    out: Float32 = np.where(magnitude < TANH_SMALL, small, large)
    return out


def softcap(x: Float32, cap: float) -> Float32:
    """cap * tanh(x / cap); x as it is for a cap of 0."""
    if not cap:
        return x
    with np.errstate(over="ignore"):
        return F(cap) * tanh(x / F(cap))


def to_half(x: Float32) -> npt.NDArray[np.uint16]:
    """fp16 bits: rounded to nearest even, clamped to +-65504 first. x holds no NaN."""
    clamped = np.minimum(np.maximum(x, -MAX_HALF), MAX_HALF)
    return clamped.astype(np.float16).view(np.uint16)


def from_half(bits: npt.NDArray[np.uint16]) -> Float32:
    """binary32 of fp16 bits, exact."""
    return bits.view(np.float16).astype(np.float32)


def embed(matrix: PackedMatrix, token_ids: npt.NDArray[np.int32]) -> Float32:
    """Rows of a matrix as binary32 (T, C): q * scale, then + min."""
    if matrix.kind == "f32":
        return matrix.f32[token_ids]
    w = matrix.unpacked
    out = w.q[:, token_ids].astype(np.float32) * w.scale[:, token_ids, None]  # (G, T, 32)
    if w.min is not None:
        out = out + w.min[:, token_ids, None]
    return out.transpose(1, 0, 2).reshape(len(token_ids), matrix.cols)
