"""Nearest quantisation: within half a step of every value, and what cannot be kept is refused."""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ModelError
from shared.quant.blocks import Int4Blocks, Int8Blocks, float32_of
from shared.quant.nearest import (
    TILE_VALUES,
    quantize_int4_affine,
    quantize_int4_symmetric,
    quantize_int8,
)

QUANTIZERS: dict[str, Callable[[np.ndarray], Int4Blocks | Int8Blocks]] = {
    "int8": quantize_int8,
    "symmetric int4": quantize_int4_symmetric,
    "affine int4": quantize_int4_affine,
}


@pytest.mark.parametrize("name", QUANTIZERS)
@given(
    rows=st.integers(1, 20),
    groups=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    exponent=st.integers(-8, 10),
    shift=st.sampled_from([0.0, 3.0, -3.0]),
)
def test_every_value_is_within_half_a_step(
    name: str, rows: int, groups: int, seed: int, exponent: int, shift: float
) -> None:
    rng = np.random.default_rng(seed)
    weights = ((rng.standard_normal((rows, 32 * groups)) + shift) * 2.0**exponent).astype("f4")

    blocks = QUANTIZERS[name](weights)
    back = float32_of(blocks)

    # Half a step, and what rounding scale and min to fp16 takes from the largest values.
    step = blocks.scale.astype(np.float32).repeat(32, axis=1)
    largest = np.abs(weights).reshape(rows, groups, 32).max(axis=2).repeat(32, axis=1)
    assert back.shape == weights.shape
    assert (np.abs(back - weights) <= 0.501 * step + largest * 2.0**-9 + 2.0**-20).all()


@pytest.mark.parametrize("name", QUANTIZERS)
def test_what_is_quantised_already_comes_back_as_it_was(name: str) -> None:
    rng = np.random.default_rng(3)
    once = float32_of(QUANTIZERS[name](rng.standard_normal((40, 96)).astype(np.float32)))

    twice = float32_of(QUANTIZERS[name](once))

    # A group without its largest q may choose another grid; most have it.
    assert np.abs(twice - once).max() <= 0.02 * np.abs(once).max()
    assert (twice == once).mean() > 0.5


def test_int8_is_as_close_as_the_gguf_package() -> None:
    weights = np.random.default_rng(4).standard_normal((64, 256)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    theirs = gguf.quants.dequantize(gguf.quants.quantize(weights, kind), kind)

    ours = float32_of(quantize_int8(weights))

    assert np.abs(ours - weights).sum() <= np.abs(theirs - weights).sum() * 1.001


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_a_group_of_one_value_is_kept(name: str, value: float) -> None:
    back = float32_of(QUANTIZERS[name](np.full((2, 64), value, np.float32)))

    np.testing.assert_allclose(back, value, rtol=2.0**-10)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_many_rows_are_as_each_alone(name: str) -> None:
    weights = np.random.default_rng(5).standard_normal((TILE_VALUES // 64 + 5, 64)).astype("f4")

    together = float32_of(QUANTIZERS[name](weights))

    for row in (0, TILE_VALUES // 64 - 1, TILE_VALUES // 64, len(weights) - 1):
        alone = float32_of(QUANTIZERS[name](weights[row : row + 1]))
        np.testing.assert_array_equal(together[row : row + 1], alone)


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    weights = np.ones((3, 32), np.float32)
    weights[2, 7] = bad

    with pytest.raises(ModelError, match="finite"):
        QUANTIZERS[name](weights)


def test_values_whose_sum_overflows_are_no_reason_to_refuse() -> None:
    weights = np.full((2, 64), 8e6, np.float32)
    weights[0, :32] = -8e6

    np.testing.assert_allclose(float32_of(quantize_int8(weights)), weights, rtol=2.0**-10)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_scale_that_fp16_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"(scale|min) at row 0, group 0 is"):
        QUANTIZERS[name](np.linspace(-1e8, 1e8, 32, dtype=np.float32).reshape(1, 32))
