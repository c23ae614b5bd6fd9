"""How the memory of each process went, and whether it is flat. Pure: samples in, values out.

Flat means that the median of the last quarter of a process's life is no more than 3 % and 2 MB
above that of its second quarter. The first is warm-up, and a single peak moves no median.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

WARM_UP_S = 10.0  # of a process, whose memory then is not yet what it will be
SHOWN_SPAN_S = 60.0
JUDGED_SPAN_S = 300.0  # what grows in less is noise
MAX_GROWTH = 0.03
MAX_GROWTH_MB = 2.0

Samples = Mapping[str, Sequence[tuple[float, int]]]


@dataclass(frozen=True, slots=True)
class RssTrend:
    """Resident memory of one process.

    `mb_per_h` is its slope after the first quarter, `growth` the share by which the last quarter is
    above the second. `is_flat` None is not judged: it lived too briefly, or is a server.
    """

    first_mb: float
    last_mb: float
    mb_per_h: float
    growth: float
    span_s: float
    is_flat: bool | None


def rss_trends(samples: Samples, *, unjudged: str = "server/") -> dict[str, RssTrend]:
    """The trend of each process that lived long enough to have one.

    `samples` are (seconds, bytes) in order of time, by role/process. A name that begins with
    `unjudged` is only shown: Redis keeps answers for an hour, and the heap of Erlang breathes.
    """
    trends = {}
    for name, points in samples.items():
        settled = [(t, b / 1e6) for t, b in points if t - points[0][0] >= WARM_UP_S]
        span_s = settled[-1][0] - settled[0][0] if settled else 0.0
        if span_s >= SHOWN_SPAN_S:
            trends[name] = _trend(settled, span_s, may_judge=not name.startswith(unjudged))
    return trends


def growing(trends: Mapping[str, RssTrend]) -> list[str]:
    """What of it is a problem, in words."""
    return [
        f"the memory of {name} is not flat: {trend.growth:+.1%} from its second to its last "
        f"quarter, {trend.first_mb:.0f} to {trend.last_mb:.0f} MB in {trend.span_s:.0f} s"
        for name, trend in trends.items()
        if trend.is_flat is False
    ]


def _trend(points: Sequence[tuple[float, float]], span_s: float, *, may_judge: bool) -> RssTrend:
    began_s = points[0][0]
    second = median(mb for t, mb in points if 0.25 <= (t - began_s) / span_s <= 0.5)
    last = median(mb for t, mb in points if (t - began_s) / span_s >= 0.75)
    is_flat = last - second <= max(MAX_GROWTH * second, MAX_GROWTH_MB)
    return RssTrend(
        first_mb=points[0][1],
        last_mb=points[-1][1],
        mb_per_h=_slope([p for p in points if (p[0] - began_s) / span_s >= 0.25]) * 3600,
        growth=last / second - 1,
        span_s=span_s,
        is_flat=is_flat if may_judge and span_s >= JUDGED_SPAN_S else None,
    )


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares, MB a second."""
    mean_t = sum(t for t, _ in points) / len(points)
    mean_mb = sum(mb for _, mb in points) / len(points)
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    return sum((t - mean_t) * (mb - mean_mb) for t, mb in points) / spread
