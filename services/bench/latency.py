"""Throughput and latency of streams that ran at once. Pure: knows only when their tokens came."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

from shared.percentiles import percentile


@dataclass(frozen=True, slots=True)
class Stream:
    """One request as its client saw it. Seconds of one clock; something came at each arrival.

    `num_tokens` may be more than the arrivals: a peer sends some tokens together.
    """

    submitted_s: float
    arrivals_s: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """Of streams that started together. Throughput counts from the first start to the last token.

    `gap_ms` is the mean time between two tokens of a stream, `next_` its percentiles.
    """

    tokens_per_s: float
    first_p50_ms: float
    first_p95_ms: float
    next_p50_ms: float
    next_p95_ms: float
    gap_ms: float


def figures_of(streams: Sequence[Stream]) -> LoadFigures:
    """Each stream needs two arrivals. Raises `ValueError` otherwise."""
    if not streams or any(len(stream.arrivals_s) < 2 for stream in streams):
        raise ValueError("a stream without a second token has no time between tokens")
    first_s = [stream.arrivals_s[0] - stream.submitted_s for stream in streams]
    next_s = [b - a for stream in streams for a, b in pairwise(stream.arrivals_s)]
    decoding_s = sum(stream.arrivals_s[-1] - stream.arrivals_s[0] for stream in streams)
    num_gaps = sum(stream.num_tokens - 1 for stream in streams)
    began_s = min(stream.submitted_s for stream in streams)
    over_s = max(stream.arrivals_s[-1] for stream in streams)
    return LoadFigures(
        sum(stream.num_tokens for stream in streams) / (over_s - began_s),
        1e3 * _percentile(first_s, 0.5),
        1e3 * _percentile(first_s, 0.95),
        1e3 * _percentile(next_s, 0.5),
        1e3 * _percentile(next_s, 0.95),
        1e3 * decoding_s / num_gaps,
    )


def median_of(rounds: Sequence[LoadFigures]) -> LoadFigures:
    """Figure by figure, over rounds of the same load."""
    return LoadFigures(*map(statistics.median, zip(*map(astuple, rounds), strict=True)))


@dataclass(frozen=True, slots=True)
class RawFigures:
    """A yardstick that ran between the loads."""

    p50_ms: float
    p95_ms: float


def raw_figures(times_s: Sequence[float]) -> RawFigures:
    return RawFigures(1e3 * _percentile(times_s, 0.5), 1e3 * _percentile(times_s, 0.95))


def _percentile(values: Sequence[float], share: float) -> float:
    value = percentile(values, share)
    assert value is not None, "there is at least one"
    return value
