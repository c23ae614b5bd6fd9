"""Remembers since when a layer group has had no worker. Knows no presence and no request."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class CoverageWatch:
    """Asks `coverage()`, the number of live workers of each group, once in `every_s`."""

    def __init__(self, coverage: Callable[[], Sequence[int]], *, every_s: float) -> None:
        self.uncovered_group: int | None = None
        self.uncovered_since_s = 0.0
        self._coverage = coverage
        self._every_s = every_s
        self._next_s = 0.0

    def look(self, now_s: float) -> None:
        """Bring both fields up to date. Raises `StoreUnavailable`."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        missing = [group for group, workers in enumerate(self._coverage()) if workers == 0]
        if missing and self.uncovered_group is None:
            self.uncovered_since_s = now_s
        self.uncovered_group = missing[0] if missing else None
