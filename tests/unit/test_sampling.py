"""Facts about drawing a token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import KernelError
from shared.model.sampling import sample, uniform

F = np.float32
LOGITS = (np.random.default_rng(3).standard_normal(1000) * 3).astype(F)


def draw(logits: np.ndarray, position: int = 0, **changes: float) -> int:
    params = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 7} | changes
    return sample(logits, position=position, **params)  # type: ignore[arg-type]


def kept_by_the_rules(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The tokens that may be drawn, by a full sort."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[:top_k] if top_k else order
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / temperature)
    sums = np.cumsum(weights)
    return set(order[: int(np.searchsorted(sums, top_p * sums[-1])) + 1])


def test_greedy_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    logits = F([0, 5, 1, 5, -2])

    assert draw(logits, temperature=0.0, top_k=3, top_p=0.5) == 1


def test_a_temperature_below_binary32_is_greedy() -> None:
    assert draw(LOGITS, temperature=1e-60) == int(np.argmax(LOGITS))
    assert draw(LOGITS, temperature=1e-30) == int(np.argmax(LOGITS))


def test_the_same_seed_and_position_give_the_same_token() -> None:
    tokens = [draw(LOGITS, position, seed=11) for position in range(50)]

    assert tokens == [draw(LOGITS, position, seed=11) for position in range(50)]
    assert tokens != [draw(LOGITS, position, seed=12) for position in range(50)]
    assert len(set(tokens)) > 10


def test_the_uniform_number_is_philox_of_seed_and_position() -> None:
    # Written down once: a change here would change what every stored seed means.
    assert uniform(0, 0) == 0.011546754286331562
    assert uniform(2**64 - 1, 1_048_576) == 0.6348899859802892


@given(
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.999, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 5.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_only_tokens_within_top_k_and_top_p_are_drawn(
    top_k: int, top_p: float, temperature: float, seed: int
) -> None:
    logits = np.random.default_rng(seed).standard_normal(60).astype(F)
    allowed = kept_by_the_rules(logits, temperature, top_k, top_p)

    drawn = {
        draw(logits, p, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        for p in range(40)
    }

    assert drawn <= allowed


def test_frequencies_follow_the_softmax() -> None:
    logits = np.log(F([0.5, 0.3, 0.15, 0.05]))

    counts = np.bincount([draw(logits, p) for p in range(4000)], minlength=4)

    np.testing.assert_allclose(counts / 4000, [0.5, 0.3, 0.15, 0.05], atol=0.03)


def test_equal_logits_are_kept_in_id_order() -> None:
    logits = np.zeros(100, F)

    by_k = {draw(logits, p, top_k=10) for p in range(300)}
    by_p = {draw(logits, p, top_p=0.0999) for p in range(300)}

    assert by_k == set(range(10))
    assert by_p == set(range(10))


def test_top_p_keeps_at_least_one_token() -> None:
    assert draw(LOGITS, top_p=1e-9) == int(np.argmax(LOGITS))


def test_top_k_beyond_the_vocabulary_changes_nothing() -> None:
    tokens = [draw(LOGITS, p, top_k=5000) for p in range(20)]

    assert tokens == [draw(LOGITS, p) for p in range(20)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    logits = LOGITS.copy()
    logits[5] = bad

    with pytest.raises(KernelError, match="not finite"):
        draw(logits, temperature=0.0)
