"""What is done to logits before a token is drawn, beside a plain formulation of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import KernelError
from shared.model.logits import LogitsProcessor, make_processors
from shared.model.sampling import sample

F = np.float32
V = 40
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 7, "position": 3}

token_lists = st.lists(st.integers(0, V - 1), max_size=100)
penalties = st.sampled_from([-2.0, -0.3, 0.0, 0.7, 2.0])


def shaped(processors: Sequence[LogitsProcessor], logits: np.ndarray) -> np.ndarray:
    out = logits.copy()
    for processor in processors:
        processor.process(out)
    return out


def plainly(
    logits: np.ndarray,
    prompt: Sequence[int],
    generated: Sequence[int],
    bias: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
) -> np.ndarray:
    """Token by token, one binary32 operation after the other."""
    out = logits.copy()
    for token in range(len(logits)):
        value = F(logits[token])
        if token in bias:
            value = F(value + F(bias[token]))
        if repetition != 1 and token in {*prompt, *generated}:
            value = F(value / F(repetition)) if value > 0 else F(value * F(repetition))
        count = generated.count(token)
        value = F(value - F(F(frequency) * F(count)))
        value = F(value - F(presence)) if count else value
        out[token] = value
    return out


@given(
    prompt=token_lists,
    generated=token_lists,
    bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100, width=32), max_size=5),
    repetition=st.sampled_from([0.01, 0.8, 1.0, 1.3, 100.0]),
    frequency=penalties,
    presence=penalties,
    seed=st.integers(0, 1000),
)
@settings(max_examples=150, deadline=None)
def test_bias_and_penalties_are_those_of_the_page(
    prompt: list[int],
    generated: list[int],
    bias: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
    seed: int,
) -> None:
    logits = (np.random.default_rng(seed).standard_normal(V) * 9).astype(F)
    processors = make_processors(
        prompt=prompt,
        logit_bias=sorted(bias.items()),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )

    for token in generated:
        shaped(processors, logits)  # as between tokens: asking changes nothing
        for processor in processors:
            processor.advance(token)

    expected = plainly(logits, prompt, generated, bias, repetition, frequency, presence)
    np.testing.assert_array_equal(shaped(processors, logits), expected)


def test_values_by_hand() -> None:
    logits = F([2, -2, 1, 0.5, 4])
    processors = make_processors(
        prompt=[0, 1],
        logit_bias=[(4, -3.0)],
        repetition_penalty=2.0,
        frequency_penalty=0.5,
        presence_penalty=0.25,
    )
    for token in (2, 2, 4):
        for processor in processors:
            processor.advance(token)

    #    prompt 2/2, -2*2; twice 1/2 - 2*0.5 - 0.25; unseen; once (4-3)/2 - 0.5 - 0.25
    np.testing.assert_array_equal(shaped(processors, logits), F([1, -4, -0.75, 0.5, -0.25]))


def test_nothing_asked_is_nothing_done() -> None:
    assert make_processors(prompt=[1, 2, 3]) == []


def test_greedy_takes_the_largest_of_the_changed_logits() -> None:
    logits = F([1, 5, 4])

    token = sample(logits, **GREEDY, processors=make_processors(prompt=[], logit_bias=[(1, -2.0)]))

    assert token == 2
    np.testing.assert_array_equal(logits, F([1, 5, 4]), "the caller's logits stay as they are")


class Only:
    """Forbids all tokens but some."""

    def __init__(self, *allowed: int) -> None:
        self.allowed = allowed

    def process(self, logits: np.ndarray) -> None:
        mask = np.full(len(logits), -np.inf, F)
        mask[list(self.allowed)] = 0
        logits += mask

    def advance(self, token_id: int) -> None:
        pass


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 5.0},
        {"temperature": 5.0, "top_k": 3},
        {"temperature": 5.0, "top_p": 0.5},
        {"temperature": 5.0, "min_p": 0.2},
    ],
)
def test_a_forbidden_token_is_never_drawn(params: dict[str, float]) -> None:
    logits = (np.random.default_rng(1).standard_normal(V) * 3).astype(F)

    drawn = {
        sample(logits, **{**GREEDY, **params, "position": p}, processors=[Only(4, 9)])  # type: ignore[arg-type]
        for p in range(50)
    }

    assert drawn <= {4, 9}
    assert drawn == {4, 9} or params["temperature"] == 0 or len(params) > 1


def test_where_nothing_is_allowed_there_is_an_error() -> None:
    with pytest.raises(KernelError, match="no token is left"):
        sample(F([1, 2]), **GREEDY, processors=[Only()])


def test_logits_that_are_not_finite_are_no_processors_fault() -> None:
    with pytest.raises(KernelError, match="logits are not finite"):
        sample(F([1, np.nan]), **GREEDY, processors=[Only(0)])


@given(
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    top_k=st.sampled_from([0, 5, 20]),
    top_p=st.sampled_from([0.4, 0.9, 1.0]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_only_tokens_as_likely_as_min_p_of_the_likeliest_are_drawn(
    min_p: float, top_k: int, top_p: float, seed: int
) -> None:
    logits = np.random.default_rng(seed).standard_normal(60).astype(F)
    order = sorted(range(60), key=lambda i: (-logits[i], i))[: top_k or 60]
    weights = np.exp((logits[order].astype(float) - logits.max()) / 0.7)
    order = [i for i, w in zip(order, weights, strict=True) if w >= min_p * (1 - 1e-6)]
    sums = np.cumsum(weights[: len(order)])
    allowed = set(order[: int(np.searchsorted(sums, top_p * sums[-1])) + 1])

    drawn = {
        sample(
            logits, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=p
        )
        for p in range(40)
    }

    assert drawn <= allowed
