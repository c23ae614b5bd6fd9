"""Lets requests run when there is room for them and their KV rows. Knows no store: it counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from services.scheduler.held import Held
from shared.kv_budget import KvBudget


class WaitingRoom:
    """The requests that are admitted, in order; `start` sends the first step of one.

    Those behind a big one wait too, or it would starve. Those of batches wait until no other does.
    """

    def __init__(
        self, budget: KvBudget, start: Callable[[str, Held], None], *, bytes_per_position: int
    ) -> None:
        self._budget = budget
        self._bytes_per_position = bytes_per_position
        self._start = start
        self._first: deque[str] = deque()
        self._batch: deque[str] = deque()

    def enter(self, request_id: str, *, is_batch: bool = False) -> None:
        (self._batch if is_batch else self._first).append(request_id)

    def let_in(self, in_flight: Mapping[str, Held]) -> None:
        """Reserve room for those that come next, and start those that wait.

        One that runs already, started by another scheduler, has its room whether it fits or not.
        Those of batches stay. Raises what `start` does; the request is still the next one then.
        """
        self._empty(self._first, in_flight)

    def let_in_batch(self, in_flight: Mapping[str, Held]) -> None:
        """The same for those of batches, if no other waits."""
        if self._empty(self._first, in_flight):
            self._empty(self._batch, in_flight)

    def _empty(self, order: deque[str], in_flight: Mapping[str, Held]) -> bool:
        """Let in the requests of one lane; whether none of them waits any more."""
        while order:
            request_id = order[0]
            held = in_flight.get(request_id)
            if held is not None and held.running is not None:
                if held.is_waiting:
                    if not self._budget.fits(held.kv_bytes, is_batch=held.is_batch):
                        return False
                    self._start(request_id, held)
                    held.is_waiting = False
                self.reserve(request_id, held)
            order.popleft()
        return True

    def reserve(self, request_id: str, held: Held) -> None:
        """Take the bytes of the rows of its own. Those that it shares have a budget of theirs."""
        shared_bytes = held.num_cached * self._bytes_per_position
        own_bytes = held.kv_bytes - shared_bytes
        self._budget.reserve(
            request_id, own_bytes, shared_bytes=shared_bytes, is_batch=held.is_batch
        )
