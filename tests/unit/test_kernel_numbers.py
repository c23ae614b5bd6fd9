"""Facts about single operations: the C kernel equals the reference, and that equals the page."""

from __future__ import annotations

import ctypes
import platform
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import KernelError
from shared.kernel import reference
from shared.kernel.chunks import BLOCK_ROWS
from shared.kernel.matrix import PackedMatrix
from shared.quant.pack import pack_int4, pack_int8
from tests.kernel_backends import require_native

F = np.float32
HARD_HALVES = np.array([0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x7BFF, 0xFBFF], np.uint16)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def random_matrix(rng: np.random.Generator, kind: str, rows: int, groups: int) -> PackedMatrix:
    """Ordinary scales, with zeros, subnormals and the largest ones strewn in."""
    halves = (rng.standard_normal((2, rows, groups)) * 0.05).astype(np.float16)
    hard = rng.choice(HARD_HALVES, (2, rows, groups)).view(np.float16)
    scale, minimum = np.where(rng.random((2, rows, groups)) < 0.1, hard, halves)
    chunk_rows = BLOCK_ROWS * int(rng.integers(1, 4))
    if kind == "int4":
        nibbles = rng.integers(0, 256, (rows, groups, 16)).astype(np.uint8)
        packed = pack_int4(scale, minimum, nibbles, chunk_rows)
    else:
        q = rng.integers(-128, 128, (rows, groups, 32)).astype(np.int8)
        packed = pack_int8(scale, q, chunk_rows)
    return PackedMatrix(kind, rows, 32 * groups, chunk_rows, packed)


def random_activations(rng: np.random.Generator, rows: int, groups: int) -> np.ndarray:
    """Groups of every size from zero over subnormal to huge, some with one value that dominates."""
    x = rng.standard_normal((rows, groups, 32)).astype(F)
    x *= rng.choice(F([0, 1e-42, 1e-35, 2.0**-100, 1e-3, 1, 1, 1, 1e6]), (rows, groups, 1))
    x[rng.random(x.shape) < 0.02] *= 1000
    return x.reshape(rows, 32 * groups)


def matmul_by_the_page(matrix: PackedMatrix, x: np.ndarray, terms: int) -> np.ndarray:
    """docs/arithmetic.md, one number at a time."""
    w = matrix.unpacked
    n = 127 if terms == 1 else 32258
    out = np.zeros((len(x), matrix.rows), F)
    for b, row in enumerate(x.reshape(len(x), -1, 32)):
        for r in range(matrix.rows):
            sum_a = sum_b = F(0)
            for g, values in enumerate(row):
                amax = np.abs(values).max()
                d, q = F(0), np.zeros(32, np.int64)
                if amax >= 2.0**-100:
                    d, inverse = amax / F(n), F(n) / amax
                    q = np.rint(values * inverse).clip(-n, n).astype(np.int64)
                first = (q + 127) // 254 if terms == 2 else 0 * q
                second = q - 254 * first
                assert max(abs(first).max(), abs(second).max()) <= 127
                weights = w.q[g, r].astype(np.int64)
                dot = 254 * int((weights * first).sum()) + int((weights * second).sum())
                sum_a = sum_a + (w.scale[g, r] * d) * F(dot)
                if w.min is not None:
                    sum_b = sum_b + w.min[g, r] * (d * F(int(q.sum())))
            out[b, r] = sum_a + sum_b if w.min is not None else sum_a
    return out


@given(
    kind=st.sampled_from(["int4", "int8"]),
    rows=st.integers(1, 20),
    groups=st.integers(1, 5),
    batch=st.integers(1, 3),
    terms=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_reference_matmul_equals_the_page(
    kind: str, rows: int, groups: int, batch: int, terms: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, kind, rows, groups)
    x = random_activations(rng, batch, groups)

    got = reference.matmul(matrix, reference.quantize_activations(x, terms))

    assert same_bits(got, matmul_by_the_page(matrix, x, terms))


@given(
    kind=st.sampled_from(["int4", "int8"]),
    rows=st.integers(1, 100),
    groups=st.integers(1, 20),
    batch=st.integers(1, 19),
    terms=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_native_matmul_equals_the_reference(
    kind: str, rows: int, groups: int, batch: int, terms: int, seed: int
) -> None:
    require_native()
    from shared.kernel import native

    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, kind, rows, groups)
    x = random_activations(rng, batch, groups)

    want = reference.matmul(matrix, reference.quantize_activations(x, terms))

    assert same_bits(native.matmul(matrix, x, terms), want)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("terms", "steps"), [(1, 127), (2, 32258)])
def test_saturated_products_do_not_overflow(kind: str, sign: int, terms: int, steps: int) -> None:
    require_native()
    from shared.kernel import native

    ones = np.ones((16, 2), F).astype(np.float16)
    if kind == "int4":
        packed = pack_int4(ones, 0 * ones, np.full((16, 2, 16), 255, np.uint8), 16)
    else:
        packed = pack_int8(ones, np.full((16, 2, 32), -128, np.int8), 16)
    matrix = PackedMatrix(kind, 16, 64, 16, packed)
    x = np.full((1, 64), sign * steps, F)

    got = native.matmul(matrix, x, terms)

    assert (got == sign * 64 * steps * (15 if kind == "int4" else -128)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_are_refused_with_their_row(bad: float) -> None:
    require_native()
    from shared.kernel import native

    matrix = random_matrix(np.random.default_rng(0), "int4", 16, 2)
    x = np.ones((4, 64), F)
    x[2, 40] = bad

    with pytest.raises(KernelError, match="row 2"):
        reference.quantize_activations(x)
    with pytest.raises(KernelError, match="row 2"):
        native.matmul(matrix, x)


def test_half_precision_equals_the_reference_for_every_half() -> None:
    require_native()
    from shared.kernel import native

    bits = np.arange(65536, dtype=np.uint16)
    bits = bits[(bits & 0x7C00) != 0x7C00]  # finite

    wide = native.from_half(bits)

    assert same_bits(wide, reference.from_half(bits))
    assert same_bits(native.to_half(wide), bits)


def test_rounding_to_half_equals_the_reference_at_ties_and_beyond_the_range() -> None:
    require_native()
    from shared.kernel import native

    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(F)
    ties = (halves[:-1] + halves[1:]) / 2
    near = np.concatenate([np.nextafter(ties, F(0)), ties, np.nextafter(ties, F(np.inf))])
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 2**32, 100_000).astype(np.uint32).view(F)
    x = np.concatenate([near, F([65504, 65519, 65520, 1e38, np.inf]), anything])
    x = x[~np.isnan(x)]
    x = np.concatenate([x, -x])

    got = native.to_half(x)

    assert same_bits(got, reference.to_half(x))
    assert not ((got & 0x7C00) == 0x7C00).any()


def test_exp_equals_the_reference_and_is_close_to_the_truth() -> None:
    require_native()
    from shared.kernel import native

    rng = np.random.default_rng(2)
    spread = rng.uniform(-90, 90, 100_000).astype(F)
    anything = rng.integers(0, 2**32, 100_000).astype(np.uint32).view(F)
    edges = F([0, -0.0, -87, 88, -87.00001, 89, 1e-45, -1e-45, 1e38, -1e38])
    x = np.concatenate([spread, anything[np.isfinite(anything)], edges])

    got = native.exp(x)

    assert same_bits(got, reference.exp(x))
    truth = np.exp(x.clip(-87, 88).astype(np.float64))
    assert np.abs(got / truth - 1).max() < 3e-7  # the polynomial ends there
    assert (reference.exp(F([0, -0.0])) == 1).all()


def test_sum8_adds_in_lanes_and_then_in_a_tree() -> None:
    x = np.zeros(16, F)
    x[0], x[8], x[4] = 1e8, 1, -1e8  # lane 0 loses the 1 before lane 4 takes the rest away

    assert reference.sum8(x) == 0
    assert reference.sum8(x[::-1].copy()) == 0
    x[8], x[9] = 0, 1
    assert reference.sum8(x) == 1


def test_a_mean_square_that_overflows_is_an_error_and_not_zeros() -> None:
    x = np.ones((3, 8), F)
    x[1] = 1e30

    with pytest.raises(KernelError, match="row 1"):
        reference.rms_norm(x, np.ones(8, F), 1e-5)


@pytest.mark.parametrize("half_pairing", [False, True])
def test_rope_turns_each_pair_by_its_angle(half_pairing: bool) -> None:
    x = np.arange(1, 9, dtype=F).reshape(1, 1, 8)
    angles = np.array([[0.1, 0.2, 0.3, 0.4]])

    got = reference.rope(
        x, np.cos(angles).astype(F), np.sin(angles).astype(F), half_pairing=half_pairing
    )

    pairs = x.reshape(2, 4).T if half_pairing else x.reshape(4, 2)
    turned = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * angles[0])
    want = np.stack([turned.real, turned.imag])
    want = want.reshape(8) if half_pairing else want.T.reshape(8)
    np.testing.assert_allclose(got.reshape(8), want, rtol=1e-5)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="sets glibc's MXCSR"
)
def test_a_host_that_flushes_subnormals_changes_nothing_and_keeps_its_mode() -> None:
    require_native()
    from shared.kernel import native

    tiny = np.full((16, 1), 2.0**-24, np.float16)
    packed = pack_int8(tiny, np.full((16, 1, 32), 100, np.int8), 16)
    matrix = PackedMatrix("int8", 16, 32, 16, packed)
    x = np.full((1, 32), 2.0**-99, F)
    want = reference.matmul(matrix, reference.quantize_activations(x))
    libm = ctypes.CDLL("libm.so.6")
    saved, flushing, after = (ctypes.create_string_buffer(32) for _ in range(3))
    libm.fegetenv(saved)
    libm.fegetenv(flushing)
    mxcsr = int.from_bytes(flushing.raw[28:32], "little") | 0x8040
    flushing[28:32] = mxcsr.to_bytes(4, "little")

    libm.fesetenv(flushing)
    try:
        got = native.matmul(matrix, x)
        libm.fegetenv(after)
    finally:
        libm.fesetenv(saved)

    assert (want != 0).all()
    assert same_bits(got, want)
    assert int.from_bytes(after.raw[28:32], "little") & 0x8040 == 0x8040
