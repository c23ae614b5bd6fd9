"""Interleaved repetitions and their medians. Knows nothing of what is measured.

On a shared machine speed changes from second to second: two things are compared by running them in
turns and taking the median of each turn's ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Rates = dict[str, list[float]]


def timed_rate(work: Callable[[], object], amount: float) -> Callable[[], float]:
    """A measurement of `amount` per second."""

    def measure() -> float:
        started_s = time.perf_counter()
        work()
        return amount / (time.perf_counter() - started_s)

    return measure


def interleave(measures: Mapping[str, Callable[[], float]], repeats: int) -> Rates:
    """Each measurement once a turn, `repeats` turns, after one turn that does not count."""
    rates: Rates = {name: [] for name in measures}
    for turn in range(repeats + 1):
        for name, measure in measures.items():
            rate = measure()
            if turn:
                rates[name].append(rate)
    return rates


def median_overhead(rates: Rates, name: str, inner: str) -> float:
    """The median of the turns' shares of `name`'s time that is not `inner`'s, a part of it."""
    return statistics.median(
        1 - ours / alone for ours, alone in zip(rates[name], rates[inner], strict=True)
    )


def median_ratio(rates: Rates, name: str, base: str) -> float:
    """The median of the turns' ratios of two measurements."""
    return statistics.median(a / b for a, b in zip(rates[name], rates[base], strict=True))


def spread(turns: Sequence[float]) -> float:
    """How far the turns disagree: their middle half's width, as a part of their median."""
    if len(turns) < 3:
        return 0.0
    first, _, third = statistics.quantiles(turns, n=4, method="inclusive")
    return (third - first) / statistics.median(turns)
