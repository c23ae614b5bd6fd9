"""The choice of types under a budget is the best there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.quality.budget import Option, Unit, choose
from shared.errors import ConfigError


@st.composite
def units(draw: st.DrawFn) -> list[Unit]:
    def unit(number: int) -> Unit:
        options = tuple(
            Option(f"T{i}", draw(st.integers(1, 50)), draw(st.integers(0, 40)) / 8)
            for i in range(draw(st.integers(1, 3)))
        )
        return Unit(f"unit {number}", 100, options)

    return [unit(number) for number in range(draw(st.integers(1, 5)))]


def loss_of(options: tuple[Option, ...]) -> float:
    return sum(option.loss for option in options)


def bytes_of(options: tuple[Option, ...]) -> int:
    return sum(option.num_bytes for option in options)


@given(units(), st.integers(0, 60))
def test_no_other_choice_that_fits_loses_less(made: list[Unit], room: int) -> None:
    every = list(itertools.product(*(unit.options for unit in made)))
    budget = min(map(bytes_of, every)) + room

    chosen = choose(made, max_bytes=budget)

    assert bytes_of(chosen) <= budget
    assert loss_of(chosen) == min(loss_of(c) for c in every if bytes_of(c) <= budget)
    assert all(option in unit.options for option, unit in zip(chosen, made, strict=True))


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_does() -> None:
    unit = Unit("head", 64, (Option("Q4_0", 36, 1.0), Option("Q8_0", 68, 0.0)))

    with pytest.raises(ConfigError, match=r"smallest types take 36, 4\.500 bits"):
        choose([unit], max_bytes=35)
