"""What was seen of a run, over time. Counts; decides nothing."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

NUM_BUCKETS = 60
SHARES = (0.5, 0.9, 0.99)
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; None where nothing was seen."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None
    count: int

    @classmethod
    def of(cls, values: Array) -> Percentiles:
        if not len(values):
            return cls(None, None, None, None, None, 0)
        p50, p90, p99 = np.quantile(values, SHARES).tolist()
        return cls(float(values.mean()), p50, p90, p99, float(values.max()), len(values))


@dataclass(frozen=True, slots=True)
class Moment:
    """What was there at the start of a bucket: requests that wait to be let in, that run, and
    that stand still; workers that serve, nodes that are spare or dead, and the longest time that a
    step still has to stay where it is."""

    at_s: float
    num_waiting: int
    num_running: int
    num_still: int
    num_workers_up: int
    num_spares: int
    num_dead_nodes: int
    longest_stop_s: float


@dataclass(slots=True)
class Figures:
    """All that is counted. `bucket_s` is the length of one of the `NUM_BUCKETS` parts of time."""

    horizon_s: float
    num_arrived: int = 0
    num_refused: int = 0
    num_completed: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_redrives: int = 0
    num_handovers: int = 0
    num_poisoned: int = 0
    num_failed_steps: int = 0
    num_quarantines: int = 0
    num_node_failures: int = 0
    num_process_deaths: int = 0
    num_replaced: int = 0
    outages: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)  # by reason
    moments: list[Moment] = field(default_factory=list)
    ended_s: float = 0.0
    _token_s: array[float] = field(default_factory=lambda: array("d"))
    _gap_s: array[float] = field(default_factory=lambda: array("d"))
    _first_s: array[float] = field(default_factory=lambda: array("d"))
    _first_wait_s: array[float] = field(default_factory=lambda: array("d"))
    _end_s: array[float] = field(default_factory=lambda: array("d"))
    _whole_s: array[float] = field(default_factory=lambda: array("d"))
    _redriven_s: array[float] = field(default_factory=lambda: array("d"))
    _busy_s: list[float] = field(default_factory=lambda: [0.0] * (NUM_BUCKETS + 1))

    @property
    def bucket_s(self) -> float:
        return self.horizon_s / NUM_BUCKETS

    def busy(self, at_s: float, seconds: float) -> None:
        """So much work of workers, by about that time."""
        bucket = int(at_s / self.horizon_s * NUM_BUCKETS)
        self._busy_s[bucket if bucket < NUM_BUCKETS else NUM_BUCKETS] += seconds

    def first_token(self, at_s: float, waited_s: float) -> None:
        self.num_tokens += 1
        self._first_s.append(at_s)
        self._first_wait_s.append(waited_s)

    def token(self, at_s: float, gap_s: float) -> None:
        self.num_tokens += 1
        self._token_s.append(at_s)
        self._gap_s.append(gap_s)

    def completed(self, at_s: float, took_s: float) -> None:
        self.num_completed += 1
        self._end_s.append(at_s)
        self._whole_s.append(took_s)

    def failed(self, reason: str) -> None:
        self.num_failed += 1
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def redriven(self, at_s: float) -> None:
        self.num_redrives += 1
        self._redriven_s.append(at_s)

    @property
    def first_waits_s(self) -> Array:
        """From arrival to first token, in order of time."""
        return np.array(self._first_wait_s)

    @property
    def gaps_s(self) -> Array:
        """From one token of a request to its next."""
        return np.array(self._gap_s)

    @property
    def whole_s(self) -> Array:
        """From arrival to last token."""
        return np.array(self._whole_s)

    @property
    def last_end_s(self) -> float:
        """When the last request was completed."""
        return max(self._end_s, default=0.0)

    @property
    def busy_total_s(self) -> float:
        return sum(self._busy_s)

    def over_time(self, num_workers: int) -> list[dict[str, Any]]:
        """A row a bucket: tokens a second, percentiles, utilisation, queues."""
        edges = np.linspace(0.0, self.horizon_s, NUM_BUCKETS + 1)
        tokens = np.histogram(np.array(self._token_s), edges)[0]
        tokens += np.histogram(np.array(self._first_s), edges)[0]
        ended = np.histogram(np.array(self._end_s), edges)[0]
        redriven = np.histogram(np.array(self._redriven_s), edges)[0]
        firsts = _by_bucket(np.array(self._first_s), self.first_waits_s, edges)
        gaps = _by_bucket(np.array(self._token_s), self.gaps_s, edges)
        rows = []
        for number, moment in enumerate(self.moments[:NUM_BUCKETS]):
            rows.append(
                {
                    **asdict(moment),
                    "tokens_per_s": float(tokens[number] / self.bucket_s),
                    "requests_per_s": float(ended[number] / self.bucket_s),
                    "redriven": int(redriven[number]),
                    "first_token_s": asdict(Percentiles.of(firsts[number])),
                    "token_s": asdict(Percentiles.of(gaps[number])),
                    "utilisation": self._busy_s[number] / (self.bucket_s * max(1, num_workers)),
                }
            )
        return rows


def _by_bucket(times: Array, values: Array, edges: Array) -> list[Array]:
    order = np.argsort(times, kind="stable")
    places = np.searchsorted(times[order], edges)
    values = values[order]
    return [values[a:b] for a, b in pairwise(places)]
