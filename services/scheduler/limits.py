"""The bounds of one scheduler, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of one scheduler. `reply_patience_s` is how long a full reply queue is tried."""

    max_in_flight: int = 256
    poll_s: float = 0.05
    coverage_check_s: float = 1.0
    uncovered_grace_s: float = 15.0
    confirm_timeout_s: float = 10.0
    reply_retry_s: float = 1.0
    reply_patience_s: float = 60.0
