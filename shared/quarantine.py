"""Decides when a worker that keeps failing takes a break, and how long. Pure: knows no queue.

One request that cannot be computed is its own fault; different ones, with no success between, are
the node's: its memory, its CPU, its copy of the weights.
"""

from __future__ import annotations

MAX_FAILURES = 3
FIRST_BREAK_S = 2.0
MAX_BREAK_S = 300.0
GOOD_AGAIN = 100  # steps without a failure after which old breaks do not count


class Quarantine:
    """The failures of one worker."""

    def __init__(self) -> None:
        self.num_failures = 0
        self._failed: set[str] = set()  # requests, since the last success
        self._num_breaks = 0
        self._num_good = 0

    @property
    def is_due(self) -> bool:
        return len(self._failed) >= MAX_FAILURES

    def failed(self, request_id: str) -> None:
        self.num_failures += 1
        self._num_good = 0
        self._failed.add(request_id)

    def succeeded(self) -> None:
        self._num_good += 1
        self._failed.clear()
        if self._num_good >= GOOD_AGAIN:
            self._num_breaks = 0

    def begin(self) -> float:
        """Take the break that is due; returns its seconds. Each is twice the one before."""
        self._failed.clear()
        break_s = min(MAX_BREAK_S, FIRST_BREAK_S * 2.0 ** min(self._num_breaks, 30))
        self._num_breaks += 1
        return break_s
