"""The statistics of `cellpipe bench cluster --mixed`, from values with known answers."""

from __future__ import annotations

import pytest

from services.bench.mixed import MixedRound, gaps_s, mixed_dict, mixed_lines, summary_of
from services.bench.options import ClusterOptions


def test_a_gap_counts_as_mixed_when_any_of_it_is_beside_a_prompt() -> None:
    stream = [0.0, 1.0, 3.0, 4.0, 7.0, 8.0, 20.0]

    alone, mixed = gaps_s([stream], [(2.5, 3.5), (7.5, 9.0)])

    assert alone == [1.0, 3.0]
    assert mixed == [2.0, 1.0, 1.0, 12.0]


def test_what_comes_after_the_last_prompt_counts_for_neither() -> None:
    alone, mixed = gaps_s([[0.0, 1.0, 5.0, 6.0]], [(2.0, 3.0)])

    assert (alone, mixed) == ([1.0], [4.0])


def test_ratios_are_medians_of_the_rounds_ratios() -> None:
    rounds = [
        MixedRound(100, 150, 10, 20, 20, 40),
        MixedRound(400, 400, 10, 20, 40, 120),
        MixedRound(200, 280, 30, 60, 60, 150),
    ]

    figures = summary_of("tiny@1", ClusterOptions("tiny", concurrency=(8,)), 8, 3, rounds)

    assert (figures.first_ratio, figures.next_p95_ratio) == pytest.approx((1.4, 2.5))
    assert figures.median == MixedRound(200, 280, 10, 20, 40, 120)
    text = "\n".join(mixed_lines(figures))
    assert "1.40" in text
    assert "2.50" in text
    assert mixed_dict(figures)["rounds"][1]["next_p95_mixed_ms"] == 120
