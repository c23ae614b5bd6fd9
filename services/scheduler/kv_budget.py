"""Reserves KV bytes for requests before they run. Knows no store: it counts what may be written."""

from __future__ import annotations


class KvBudget:
    """What the requests of one scheduler may write in all; `max_bytes` None is no limit."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._reserved: dict[str, int] = {}

    @property
    def reserved_bytes(self) -> int:
        return sum(self._reserved.values())

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes are free now."""
        return self.max_bytes is None or self.reserved_bytes + num_bytes <= self.max_bytes

    def can_ever_fit(self, num_bytes: int) -> bool:
        return self.max_bytes is None or num_bytes <= self.max_bytes

    def reserve(self, request_id: str, num_bytes: int) -> None:
        """Take the bytes, over the limit if need be: for what another scheduler let in."""
        self._reserved[request_id] = num_bytes

    def release(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)
