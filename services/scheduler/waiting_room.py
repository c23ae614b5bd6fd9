"""Lets requests run when there is room for them and their KV rows. Knows no store: it counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from services.scheduler.held import Held


class KvBudget:
    """What the requests of one scheduler may write in all, and how many there may be.

    None is no limit. `worker_bytes` is what the workers' memory holds: there rows count that are
    shared in the store, since each request has its own copy.
    """

    def __init__(self, max_bytes: int | None, max_requests: int | None = None) -> None:
        self.max_bytes = max_bytes
        self._max_requests = max_requests
        self.worker_bytes: int | None = None
        self._reserved: dict[str, int] = {}
        self._held: dict[str, int] = {}

    @property
    def reserved_bytes(self) -> int:
        return sum(self._reserved.values())

    def fits(self, num_bytes: int) -> bool:
        """Whether there is room for one more request, of so many bytes."""
        if self._max_requests is not None and len(self._reserved) >= self._max_requests:
            return False
        held_bytes = sum(self._held.values())
        # One alone runs whatever a worker that left has taken with it: the others wait behind it.
        if self.worker_bytes is not None and 0 < held_bytes > self.worker_bytes - num_bytes:
            return False
        return self.max_bytes is None or self.reserved_bytes + num_bytes <= self.max_bytes

    def reserve(self, request_id: str, num_bytes: int, *, shared_bytes: int = 0) -> None:
        """Take the bytes, over the limit if need be: for what another scheduler let in.

        `shared_bytes` are beside them, in the workers' memory alone.
        """
        self._reserved[request_id] = num_bytes
        self._held[request_id] = num_bytes + shared_bytes

    def release(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)
        self._held.pop(request_id, None)


class WaitingRoom:
    """The requests that are admitted, in order; `start` sends the first step of one.

    Those behind a big one wait too, or it would starve.
    """

    def __init__(
        self, budget: KvBudget, start: Callable[[str, Held], None], *, bytes_per_position: int
    ) -> None:
        self._budget = budget
        self._bytes_per_position = bytes_per_position
        self._start = start
        self._order: deque[str] = deque()

    def enter(self, request_id: str) -> None:
        self._order.append(request_id)

    def let_in(self, in_flight: Mapping[str, Held]) -> None:
        """Reserve room for those that come next, and start those that wait.

        One that runs already, started by another scheduler, has its room whether it fits or not.
        Raises what `start` does; the request is still the next one then.
        """
        while self._order:
            request_id = self._order[0]
            held = in_flight.get(request_id)
            if held is not None and held.running is not None:
                if held.is_waiting:
                    if not self._budget.fits(held.kv_bytes):
                        return
                    self._start(request_id, held)
                    held.is_waiting = False
                self.reserve(request_id, held)
            self._order.popleft()

    def reserve(self, request_id: str, held: Held) -> None:
        """Take the bytes of the rows of its own. Those that it shares have a budget of theirs."""
        shared_bytes = held.num_cached * self._bytes_per_position
        own_bytes = held.kv_bytes - shared_bytes
        self._budget.reserve(request_id, own_bytes, shared_bytes=shared_bytes)
