"""Facts about packing: every value comes back, and lies where docs/arithmetic.md says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import KernelError, ModelError
from shared.kernel.chunks import chunk_bytes
from shared.kernel.matrix import PackedMatrix
from shared.quant.nearest import quantize_int4_symmetric, quantize_int8
from shared.quant.pack import (
    dequantize,
    pack_blocks,
    pack_int4,
    pack_int8,
    unpack_int4,
    unpack_int8,
)

ROWS = st.integers(1, 70)
GROUPS = st.integers(1, 4)
CHUNK_ROWS = st.sampled_from([16, 32, 48])
SEEDS = st.integers(0, 2**32)


def finite_halves(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Any finite fp16, subnormals and both zeros among them."""
    bits = rng.integers(0, 0x7C00, shape) | rng.integers(0, 2, shape) << 15
    return bits.astype(np.uint16).view(np.float16)


@given(rows=ROWS, groups=GROUPS, chunk_rows=CHUNK_ROWS, seed=SEEDS)
def test_int4_comes_back_as_it_was_packed(
    rows: int, groups: int, chunk_rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scale, minimum = (finite_halves(rng, (rows, groups)) for _ in range(2))
    nibbles = rng.integers(0, 256, (rows, groups, 16)).astype(np.uint8)

    packed = pack_int4(scale, minimum, nibbles, chunk_rows)
    back = unpack_int4(packed, rows, 32 * groups, chunk_rows)

    for given_array, returned in zip((scale, minimum, nibbles), back, strict=True):
        assert given_array.tobytes() == returned.tobytes()


@given(rows=ROWS, groups=GROUPS, chunk_rows=CHUNK_ROWS, seed=SEEDS)
def test_int8_comes_back_as_it_was_packed(
    rows: int, groups: int, chunk_rows: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    scale = finite_halves(rng, (rows, groups))
    q = rng.integers(-128, 128, (rows, groups, 32)).astype(np.int8)

    packed = pack_int8(scale, q, chunk_rows)
    back_scale, back_q = unpack_int8(packed, rows, 32 * groups, chunk_rows)

    assert scale.tobytes() == back_scale.tobytes()
    assert q.tobytes() == back_q.tobytes()


def test_int4_bytes_lie_where_the_page_says() -> None:
    rng = np.random.default_rng(5)
    rows, groups, chunk_rows = 40, 3, 16
    scale, minimum = (finite_halves(rng, (rows, groups)) for _ in range(2))
    q = rng.integers(0, 16, (rows, groups, 32)).astype(np.uint8)

    packed = pack_int4(scale, minimum, q[..., :16] | q[..., 16:] << 4, chunk_rows)

    for row, group in [(0, 0), (5, 2), (16, 1), (39, 2)]:
        chunk = row // chunk_rows * chunk_bytes("int4", 96, chunk_rows)
        start = chunk + group * 320
        r = row % 16
        assert packed[start + 2 * r : start + 2 * r + 2].tobytes() == scale[row, group].tobytes()
        at = start + 32 + 2 * r
        assert packed[at : at + 2].tobytes() == minimum[row, group].tobytes()
        for p in range(4):
            for i in range(4):
                byte = packed[start + 64 + 64 * p + 4 * r + i]
                assert byte & 15 == q[row, group, 4 * p + i]
                assert byte >> 4 == q[row, group, 16 + 4 * p + i]


def test_int8_bytes_lie_where_the_page_says() -> None:
    rng = np.random.default_rng(6)
    rows, groups = 30, 3
    scale = finite_halves(rng, (rows, groups))
    q = rng.integers(-128, 128, (rows, groups, 32)).astype(np.int8)

    packed = pack_int8(scale, q, 32)

    block = 128 + groups * 512  # 96 bytes of scales, padded to 64
    for row, group in [(0, 0), (17, 2), (29, 1)]:
        start, r = row // 16 * block, row % 16
        at = start + 32 * group + 2 * r
        assert packed[at : at + 2].tobytes() == scale[row, group].tobytes()
        for j in range(32):
            byte = packed[start + 128 + 512 * group + 64 * (j // 4) + 4 * r + j % 4]
            assert byte.astype(np.int8) == q[row, group, j]


def test_padding_rows_are_zero() -> None:
    ones = np.ones((1, 1), np.float16)

    packed = pack_int4(ones, ones, np.full((1, 1, 16), 255, np.uint8), 16)

    assert np.count_nonzero(packed) == 1 + 1 + 16  # of 1.0 in fp16 one byte is 0


def test_packed_bytes_are_aligned_to_a_vector() -> None:
    packed = pack_int8(np.ones((3, 2), np.float16), np.ones((3, 2, 32), np.int8), 16)

    assert packed.ctypes.data % 64 == 0


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("which", ["scale", "min"])
def test_a_scale_that_is_not_finite_is_refused_with_its_place(bad: float, which: str) -> None:
    factors = {"scale": np.ones((5, 2), np.float16), "min": np.ones((5, 2), np.float16)}
    factors[which][3, 1] = bad

    with pytest.raises(ModelError, match=f"{which} at row 3, group 1"):
        pack_int4(factors["scale"], factors["min"], np.zeros((5, 2, 16), np.uint8), 16)


def test_arrays_that_disagree_are_refused() -> None:
    half = np.ones((5, 2), np.float16)

    with pytest.raises(KernelError, match=r"\(5, 2, 16\)"):
        pack_int4(half, half, np.zeros((5, 3, 16), np.uint8), 16)
    with pytest.raises(KernelError, match="min"):
        pack_int4(half, half[:4], np.zeros((5, 2, 16), np.uint8), 16)
    with pytest.raises(KernelError, match="fp16"):
        pack_int8(half.astype(np.float32), np.zeros((5, 2, 32), np.int8), 16)


def test_a_matrix_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(KernelError, match="must have 640 bytes, got 639"):
        PackedMatrix("int4", 16, 64, 16, np.zeros(639, np.uint8))


@given(rows=st.integers(1, 20), groups=GROUPS, seed=SEEDS, exponent=st.integers(-20, 10))
def test_symmetric_int4_is_within_half_a_step(
    rows: int, groups: int, seed: int, exponent: int
) -> None:
    rng = np.random.default_rng(seed)
    weights = (rng.standard_normal((rows, 32 * groups)) * 2.0**exponent).astype(np.float32)

    blocks = quantize_int4_symmetric(weights)
    packed = pack_blocks(blocks, 16)
    back = dequantize(PackedMatrix("int4", rows, 32 * groups, 16, packed))

    # Half a step, and what rounding the scale itself to fp16 takes from the largest values.
    step = blocks.scale.astype(np.float32).repeat(32, axis=1)
    largest = np.abs(weights).reshape(rows, groups, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(back - weights) <= 0.51 * step + largest * 2.0**-10 + 2.0**-24 * 8).all()


@given(rows=st.integers(1, 20), groups=GROUPS, seed=SEEDS)
def test_symmetric_int8_is_within_half_a_step(rows: int, groups: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal((rows, 32 * groups)).astype(np.float32)

    packed = pack_blocks(quantize_int8(weights), 32)
    back = dequantize(PackedMatrix("int8", rows, 32 * groups, 32, packed))

    largest = np.abs(weights).reshape(rows, groups, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(back - weights) <= largest * (0.5 / 127 + 2.0**-10)).all()


def test_a_group_of_zeros_stays_zero() -> None:
    packed = pack_blocks(quantize_int4_symmetric(np.zeros((2, 64), np.float32)), 16)

    assert not dequantize(PackedMatrix("int4", 2, 64, 16, packed)).any()


def test_weights_too_large_for_fp16_are_refused() -> None:
    weights = np.full((2, 32), 60000.0, np.float32)  # scale fits, -8 * scale does not

    with pytest.raises(ModelError, match="min at row 0, group 0"):
        quantize_int4_symmetric(weights)
