"""The search for scale and min: never worse than plain quantisation, and right at the edges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ModelError
from shared.kernel.matrix import Float32
from shared.quant.blocks import Int4Blocks
from shared.quant.nearest import quantize_int4_affine, quantize_int4_symmetric
from shared.quant.search import search_affine, search_symmetric

Search = Callable[..., Int4Blocks]
SEARCHES = [search_affine, search_symmetric]


def errors(blocks: Int4Blocks, weights: Float32, importance: Float32 | None = None) -> np.ndarray:
    """Weighted squared error of each group, in binary64: (R, G)."""
    squares = (blocks.dequantized().astype(np.float64) - weights) ** 2
    if importance is not None:
        squares = squares * importance
    return squares.reshape(len(weights), -1, 32).sum(axis=2)


def assert_not_above(ours: np.ndarray, theirs: np.ndarray) -> None:
    # The search compares in binary32: equal errors may differ in its last bits.
    assert (ours <= theirs * (1 + 1e-4) + 1e-12).all()


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Float32, Float32]:
    """Weights of several kinds in one matrix, and an importance of its inputs."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, cols = draw(st.integers(1, 6)), 32 * draw(st.integers(1, 4))
    size = 10.0 ** draw(st.integers(-3, 2))
    shape = draw(st.sampled_from(["normal", "heavy", "shifted", "sparse", "few"]))
    match shape:
        case "normal":
            weights = rng.normal(size=(rows, cols))
        case "heavy":
            weights = rng.standard_t(2, size=(rows, cols))
        case "shifted":
            weights = rng.uniform(1, 2, size=(rows, cols))
        case "sparse":
            weights = rng.normal(size=(rows, cols)) * (rng.random((rows, cols)) < 0.1)
        case _:
            weights = rng.integers(-2, 3, size=(rows, cols)).astype(float)
    importance = np.exp(rng.normal(0, draw(st.sampled_from([0.0, 1.0, 3.0])), size=cols))
    return np.float32(weights * size).clip(-6e4, 6e4), np.float32(importance)


@given(matrices())
def test_no_group_is_worse_than_by_range_or_symmetric(made: tuple[Float32, Float32]) -> None:
    weights, _ = made

    found = errors(search_affine(weights), weights)

    assert_not_above(found, errors(quantize_int4_affine(weights), weights))
    assert_not_above(found, errors(quantize_int4_symmetric(weights), weights))


@given(matrices())
def test_no_weighted_group_is_worse_either(made: tuple[Float32, Float32]) -> None:
    weights, importance = made

    found = errors(search_affine(weights, importance), weights, importance)

    assert_not_above(found, errors(quantize_int4_affine(weights), weights, importance))
    assert_not_above(found, errors(quantize_int4_symmetric(weights), weights, importance))


@given(matrices())
def test_a_symmetric_search_is_never_worse_than_the_largest_weight_at_7(
    made: tuple[Float32, Float32],
) -> None:
    weights, importance = made

    found = search_symmetric(weights, importance)

    assert_not_above(
        errors(found, weights, importance),
        errors(quantize_int4_symmetric(weights), weights, importance),
    )
    assert np.array_equal(found.min, np.float16(-8) * found.scale)


def test_the_search_halves_the_error_of_symmetric_groups() -> None:
    weights = np.float32(np.random.default_rng(1).standard_t(5, size=(64, 256)))

    searched = errors(search_affine(weights), weights).sum()

    assert searched < 0.5 * errors(quantize_int4_symmetric(weights), weights).sum()
    assert searched < 0.85 * errors(quantize_int4_affine(weights), weights).sum()


def test_importance_moves_the_error_to_where_it_weighs_less() -> None:
    weights = np.float32(np.random.default_rng(2).normal(size=(64, 64)))
    importance = np.ones(64, np.float32)
    importance[::8] = 100.0

    squares = (search_affine(weights, importance).dequantized() - weights) ** 2
    plain = (search_affine(weights).dequantized() - weights) ** 2

    assert squares[:, ::8].mean() < 0.5 * plain[:, ::8].mean()


def test_what_a_grid_holds_is_found_again() -> None:
    rng = np.random.default_rng(3)
    q = rng.integers(0, 16, size=(32, 4, 32))
    q[:, :, 0], q[:, :, 1] = 0, 15  # the extremes tell the grid
    scale = np.float16(rng.uniform(0.001, 0.1, size=(32, 4)))
    minimum = np.float16(rng.uniform(-0.5, 0.1, size=(32, 4)))
    weights = np.float32(q) * np.float32(scale)[..., None] + np.float32(minimum)[..., None]

    found = search_affine(weights.reshape(32, 128))

    assert np.abs(found.dequantized() - weights.reshape(32, 128)).max() < 1e-6


@pytest.mark.parametrize("search", SEARCHES)
def test_zeros_stay_zeros(search: Search) -> None:
    weights = np.zeros((4, 64), np.float32)

    assert not search(weights).dequantized().any()


@pytest.mark.parametrize("value", [0.5, -0.37, 1e-5, 6e4])
def test_a_constant_group_is_kept_as_fp16_has_it(value: float) -> None:
    weights = np.full((2, 32), value, np.float32)

    kept = search_affine(weights).dequantized()

    assert np.abs(kept - weights).max() <= abs(value) * 2.0**-11 + 2.0**-25


@pytest.mark.parametrize("search", SEARCHES)
def test_the_largest_weights_that_fp16_has_give_finite_scales(search: Search) -> None:
    weights = np.float32(np.random.default_rng(4).choice([-50_000, 0, 50_000], size=(8, 64)))

    found = search(weights)

    assert np.isfinite(found.scale).all()
    assert np.isfinite(found.min).all()
    assert np.abs(found.dequantized() - weights).max() < 5_000


@pytest.mark.parametrize("bad", [np.nan, np.inf, 70_000.0])
@pytest.mark.parametrize("search", SEARCHES)
def test_a_weight_beyond_fp16_is_named(search: Search, bad: float) -> None:
    weights = np.zeros((3, 64), np.float32)
    weights[1, 40] = bad

    with pytest.raises(ModelError, match="row 1, col 40"):
        search(weights)


@pytest.mark.parametrize(
    "importance", [np.ones(32), np.full(64, -1.0), np.full(64, np.nan)], ids=["size", "sign", "nan"]
)
def test_an_importance_that_makes_no_sense_is_refused(importance: np.ndarray) -> None:
    with pytest.raises(ModelError, match="importance"):
        search_affine(np.zeros((2, 64), np.float32), np.float32(importance))


def test_threads_change_nothing() -> None:
    weights = np.float32(np.random.default_rng(5).normal(size=(600, 512)))

    one, four = search_affine(weights), search_affine(weights, num_threads=4)

    assert np.array_equal(one.nibbles, four.nibbles)
    assert np.array_equal(one.scale, four.scale)
