"""Which processes began to compute a step and did not come back. Knows no queue.

A process marks a step before it computes it and clears the mark after; marks that stay are those
of processes that died. A mark is a field named by its process, so that writing it again, by a
retry of the command or of the step, does not count twice. Only steps that were delivered before
are marked: a step that comes for the first time costs nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.store import keys
from shared.store.connection import Connection

ATTEMPTS_TTL_MS = 600_000


@dataclass(frozen=True, slots=True)
class StepName:
    """What a repeated delivery, or one that was driven again, has in common with the first one."""

    request_id: str
    layout_id: str
    group: int
    position: int

    @property
    def key(self) -> str:
        return keys.attempts(self.request_id, self.layout_id, self.group, self.position)


class Attempts:
    """Marks on steps. Raises `StoreUnavailable`, `StoreDamaged` for a key of another type."""

    def __init__(self, meta: Connection) -> None:
        self._meta = meta

    def begin(self, step: StepName, worker_id: str, *, now_unix_ms: int) -> tuple[str, ...]:
        """Mark that this process computes the step. Returns who else began it and never ended.

        The earliest comes first.
        """
        _, _, flat = self._meta.run_all(
            [
                ("HSET", step.key, worker_id, now_unix_ms),
                ("PEXPIRE", step.key, ATTEMPTS_TTL_MS),
                ("HGETALL", step.key),
            ]
        )
        marks = [(flat[i + 1], flat[i].decode("utf-8", "replace")) for i in range(0, len(flat), 2)]
        others = sorted(mark for mark in marks if mark[1] != worker_id)
        return tuple(name for _, name in others)

    def end(self, step: StepName, worker_id: str) -> None:
        """The process outlived the attempt: whatever came of it, it was no crash."""
        self._meta.run(("HDEL", step.key, worker_id))

    def forget(self, step: StepName) -> None:
        """The step is done, or buried."""
        self._meta.run(("DEL", step.key))
