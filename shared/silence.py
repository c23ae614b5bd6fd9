"""Notices which workers have stopped telling of themselves, long before presence forgets them.

Pure. A worker's figures carry the time at which it told them; here only that this time changes
counts, never what it is: clocks of two machines are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.store.presence_types import WorkerInfo

# A heartbeat a second, seen up to half a second late, and a turn that lasts a little.
SILENT_AFTER_S = 1.75


@dataclass(slots=True)
class _Word:
    told_unix_ms: int
    since_s: float
    is_doubted: bool = False


class Silence:
    """What one reader of presence knows of who still talks. Seconds are of its own clock.

    One that is silent may be dead, frozen or busy: whoever has another choice should take it.
    """

    def __init__(self, *, after_s: float = SILENT_AFTER_S) -> None:
        self._after_s = after_s
        self._words: dict[str, _Word] = {}

    def note(self, infos: Iterable[WorkerInfo], *, now_s: float) -> None:
        """Take in what presence shows now; who is not in it is forgotten."""
        words = {}
        for info in infos:
            before = self._words.get(info.worker_id)
            if before is None or before.told_unix_ms != info.told_unix_ms:
                before = _Word(info.told_unix_ms, now_s)
            words[info.worker_id] = before
        self._words = words

    def doubt(self, worker_id: str) -> None:
        """It left a message lying: it is silent until it tells of itself anew."""
        if worker_id in self._words:
            self._words[worker_id].is_doubted = True

    def is_silent(self, worker_id: str, *, now_s: float) -> bool:
        """Whether a worker that presence shows has told nothing new for a while."""
        word = self._words.get(worker_id)
        return word is not None and (word.is_doubted or now_s - word.since_s >= self._after_s)
