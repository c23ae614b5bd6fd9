"""Perplexity and divergence against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.quality.scores import Comparison, Perplexity, Scores, log_softmax


def test_probabilities_sum_to_one_however_large_the_logits() -> None:
    logits = np.float32([[1e4, 1e4 - 1, -1e4], [0, 0, 0]])

    assert np.allclose(np.exp(log_softmax(logits)).sum(axis=1), 1.0)


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    scores = Scores()
    scores.add(log_softmax(np.zeros((10, 50), np.float32)), np.arange(10, dtype=np.int32))

    found = scores.perplexity()

    assert found.value == pytest.approx(50)
    assert found.error == pytest.approx(0, abs=1e-9)
    assert found.num_scored == 10


def test_perplexity_is_the_inverse_geometric_mean_of_probabilities() -> None:
    scores = Scores()
    for probability in (0.5, 0.1, 0.9):
        logits = np.log(np.float32([[probability, 1 - probability]]))
        scores.add(log_softmax(logits), np.zeros(1, np.int32))

    found = scores.perplexity()

    losses = -np.log([0.5, 0.1, 0.9])
    assert found.value == pytest.approx((0.5 * 0.1 * 0.9) ** (-1 / 3), rel=1e-6)
    assert found.error == pytest.approx(found.value * losses.std(ddof=1) / math.sqrt(3), rel=1e-5)


def test_kl_is_from_the_reference() -> None:
    ours, reference = np.log([[0.5, 0.5]]), np.log([[0.9, 0.1]])
    comparison = Comparison()
    comparison.add(ours, reference)

    assert comparison.mean_kl() == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))


def test_a_divergence_tells_of_all_positions() -> None:
    rng = np.random.default_rng(0)
    reference = log_softmax(np.float32(rng.normal(size=(200, 30))))
    ours = reference.copy()
    ours[:50] = log_softmax(np.float32(rng.normal(size=(50, 30))))
    comparison = Comparison()
    comparison.add(ours[:120], reference[:120])
    comparison.add(ours[120:], reference[120:])

    found = comparison.divergence(Perplexity(12.0, 0, 0, 200), Perplexity(10.0, 0, 0, 200))

    kls = (np.exp(reference) * (reference - ours)).sum(axis=1)
    same = ours.argmax(axis=1) == reference.argmax(axis=1)
    assert found.mean_kl == pytest.approx(kls.mean())
    assert found.max_kl == pytest.approx(kls.max())
    assert found.median_kl == 0
    assert found.top1_agreement == same.mean() < 1
    assert found.perplexity_ratio == pytest.approx(1.2)
