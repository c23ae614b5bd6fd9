"""What happens when: a heap of calls. Knows nothing of what they do.

An item that changes its plans raises its ticket; calls with an older one are for nobody.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Call = Callable[[Any, int], None]


class Agenda:
    """Calls in order of time; those of one time in the order in which they were noted."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Call, Any, int]] = []
        self._number = 0

    @property
    def next_s(self) -> float:
        """When the next call is due; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time_s: float, call: Call, item: Any = None, ticket: int = 0) -> None:
        """Call `call(item, ticket)` at `time_s`, or at once if that is over; never, at infinity."""
        if time_s == math.inf:
            return
        self._number += 1
        heapq.heappush(self._heap, (max(time_s, self.now_s), self._number, call, item, ticket))

    def step(self) -> bool:
        """Do what is next. False when there is nothing."""
        if not self._heap:
            return False
        self.now_s, _, call, item, ticket = heapq.heappop(self._heap)
        self.num_events += 1
        call(item, ticket)
        return True

    def run(self, is_over: Callable[[float], bool]) -> None:
        """All turns, until nothing is left or `is_over` says so of the time of the next."""
        heap = self._heap
        while heap and not is_over(heap[0][0]):
            self.step()

    def waiting(self) -> list[tuple[Any, int]]:
        """Items and tickets of all that is still to come."""
        return [(item, ticket) for _, _, _, item, ticket in self._heap]
