"""Waits that grow, with jitter. Knows nothing of what is retried."""

from __future__ import annotations

import random
from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Full-jitter exponential back-off (AWS Architecture Blog, 2015).

    `next_s()` is the seconds to wait before the next attempt, drawn from half the current ceiling
    up to the ceiling; `reset()` after a success.
    """

    first_s: float = 0.05
    max_s: float = 5.0
    rng: random.Random = field(default_factory=random.Random)
    _failures: int = 0

    def next_s(self) -> float:
        ceiling = min(self.max_s, self.first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return ceiling * self.rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._failures = 0

    @property
    def failures(self) -> int:
        return self._failures
