"""Counts the KV rows of what runs, and says whether one more fits. Pure: knows no store."""

from __future__ import annotations


class KvBudget:
    """What the requests of one scheduler may write in all, and how many there may be.

    None is no limit. Whoever waits for an answer is to find room and cores: while one of them runs,
    one request of a batch does, so that batches do not starve; else `max_batch` of them in at most
    half of the room. A single one may have more.

    `worker_bytes` is what the workers' memory holds: there rows count that are
    shared in the store, since each request has its own copy.
    """

    def __init__(
        self,
        max_bytes: int | None,
        max_requests: int | None = None,
        max_batch: int | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self._max_requests = max_requests
        halves = [] if max_requests is None else [max_requests // 2]
        self._max_batch = min([*halves, *([] if max_batch is None else [max_batch])], default=None)
        self.worker_bytes: int | None = None
        self.reserved_bytes = 0
        self._held_bytes = 0
        self._reserved: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._batch: set[str] = set()  # those of the reserved that are of batches

    def fits(self, num_bytes: int, *, is_batch: bool = False) -> bool:
        """Whether there is room for one more request, of so many bytes."""
        if self._max_requests is not None and len(self._reserved) >= self._max_requests:
            return False
        held_bytes = self._held_bytes
        # One alone runs whatever a worker that left has taken with it: the others wait behind it.
        if self.worker_bytes is not None and 0 < held_bytes > self.worker_bytes - num_bytes:
            return False
        if self.max_bytes is not None and self.reserved_bytes + num_bytes > self.max_bytes:
            return False
        return not (is_batch and self._batch) or self._fits_beside(num_bytes)

    def reserve(
        self, request_id: str, num_bytes: int, *, shared_bytes: int = 0, is_batch: bool = False
    ) -> None:
        """Take the bytes, over the limit if need be: for what another scheduler let in.

        `shared_bytes` are beside them, in the workers' memory alone.
        """
        self.release(request_id)
        self._reserved[request_id] = num_bytes
        self._held[request_id] = num_bytes + shared_bytes
        self.reserved_bytes += num_bytes
        self._held_bytes += num_bytes + shared_bytes
        if is_batch:
            self._batch.add(request_id)

    def release(self, request_id: str) -> None:
        self.reserved_bytes -= self._reserved.pop(request_id, 0)
        self._held_bytes -= self._held.pop(request_id, 0)
        self._batch.discard(request_id)

    def _fits_beside(self, num_bytes: int) -> bool:
        """Whether one more request of a batch may run beside others of batches."""
        if len(self._batch) < len(self._reserved):
            return False
        if self._max_batch is not None and len(self._batch) >= self._max_batch:
            return False
        # None but those of batches has anything reserved.
        if self.worker_bytes is not None and self._held_bytes + num_bytes > self.worker_bytes // 2:
            return False
        return self.max_bytes is None or self.reserved_bytes + num_bytes <= self.max_bytes // 2
