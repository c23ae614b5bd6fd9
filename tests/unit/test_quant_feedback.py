"""Rounding with feedback: what is counted is what a text's outputs are off."""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import ModelError
from shared.quant.feedback import conditional_factor, output_errors, round_with_feedback
from shared.quant.nearest import quantize_int4_symmetric
from shared.quant.search import fit_affine, fit_symmetric, search_affine

COLS = 96


def moments_of(seed: int, *, num_rows: int = 1024) -> np.ndarray:
    """Of inputs that go together and differ in size, as those of a model do."""
    rng = np.random.default_rng(seed)
    mix = np.eye(COLS) + 0.3 * rng.normal(size=(COLS, COLS)) * (rng.random((COLS, COLS)) < 0.2)
    inputs = rng.normal(size=(num_rows, COLS)) @ mix * np.exp(0.5 * rng.normal(size=COLS))
    return inputs.T @ inputs / num_rows


def weights_of(seed: int, rows: int = 64) -> np.ndarray:
    return np.float32(np.random.default_rng(seed).normal(size=(rows, COLS)))


def test_the_factor_is_that_of_the_inverse_and_upper() -> None:
    moments = moments_of(0)
    damped = moments + 0.01 * np.diagonal(moments).mean() * np.eye(COLS)

    factor = conditional_factor(moments)

    assert np.allclose(factor.T @ factor @ damped, np.eye(COLS), atol=1e-8)
    assert not np.tril(factor, -1).any()


@pytest.mark.parametrize("seed", range(3))
def test_feedback_loses_less_than_a_search_that_knows_the_same_text(seed: int) -> None:
    moments, weights = moments_of(seed), weights_of(seed)
    powers = np.float32(np.diagonal(moments))

    fed = round_with_feedback(weights, conditional_factor(moments), fit_affine).dequantized()

    searched = search_affine(weights, powers).dequantized()
    symmetric = quantize_int4_symmetric(weights).dequantized()
    loss = output_errors(weights, fed, moments).sum()
    assert loss < 0.9 * output_errors(weights, searched, moments).sum()
    assert loss < 0.45 * output_errors(weights, symmetric, moments).sum()


def test_inputs_that_do_not_go_together_leave_nothing_to_feed_back() -> None:
    weights = weights_of(7)

    fed = round_with_feedback(weights, conditional_factor(np.eye(COLS)), fit_affine)

    searched = search_affine(weights)
    assert np.array_equal(fed.scale, searched.scale)
    assert np.array_equal(fed.nibbles, searched.nibbles)


def test_a_symmetric_fit_gives_what_q4_0_holds() -> None:
    made = round_with_feedback(weights_of(8), conditional_factor(moments_of(8)), fit_symmetric)

    assert np.array_equal(made.min, np.float16(-8) * made.scale)


def test_inputs_that_a_text_never_showed_are_rounded_all_the_same() -> None:
    moments = moments_of(9)
    moments[:, :40] = moments[:40] = 0.0
    weights = weights_of(9)

    made = round_with_feedback(weights, conditional_factor(moments), fit_affine)

    off = np.abs(made.dequantized() - weights)[:, :32]
    assert off.max() < 0.5  # a group's step is about a third; it is not thrown away


def test_moments_of_no_text_are_as_good_as_none() -> None:
    assert np.array_equal(conditional_factor(np.zeros((64, 64))), np.eye(64))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_moments_that_are_not_finite_are_refused(bad: float) -> None:
    moments = np.eye(32)
    moments[3, 4] = bad

    with pytest.raises(ModelError, match="not finite"):
        conditional_factor(moments)


def test_output_errors_are_those_of_the_outputs() -> None:
    rng = np.random.default_rng(11)
    inputs = rng.normal(size=(50, COLS))
    weights, kept = weights_of(1, 4), weights_of(2, 4)

    errors = output_errors(weights, kept, inputs.T @ inputs)

    assert np.allclose(errors, (((weights - kept) @ inputs.T) ** 2).sum(axis=1))
