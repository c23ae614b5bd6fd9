"""Figures of the kernel that something disturbed say so."""

from __future__ import annotations

from services.bench.figures import spread
from services.bench.kernel import KernelFigures


def test_turns_that_disagree_have_a_spread() -> None:
    assert spread([10.0, 10.0, 10.0, 10.0]) == 0.0
    assert spread([5.0, 10.0]) == 0.0  # too few to say
    assert spread([10.0, 10.1, 9.9, 2.0, 10.0]) < 0.05  # one bad turn does not move a median
    assert spread([10.0, 4.0, 9.0, 3.0, 10.0]) > 0.5


def test_a_share_over_its_limit_and_turns_apart_are_doubts() -> None:
    figures = KernelFigures("avx2", 1)
    figures.bandwidth_shares = {"int4": 0.9}
    figures.compute_shares = {"4": 0.5, "16": 2.58}
    figures.spreads = {"the peak": 0.6, "batch 4": 0.03}

    assert figures.doubts() == [
        "batch 16 is at 258% of its limit",
        "turns of the peak differ by 60%",
    ]
    assert KernelFigures("avx2", 1).doubts() == []
