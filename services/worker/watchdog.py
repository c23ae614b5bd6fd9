"""Ends a process whose computation makes no progress. Knows nothing of what is computed.

A computation that hangs in native code can be interrupted by nothing but the end of its process;
its deliveries then go to others. Time is counted in looks, not by the clock: a process that was
frozen and goes on has not hung.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

log = structlog.get_logger()

EXIT_HUNG = 70
LOOKS_PER_LIMIT = 20


class Watchdog:
    """`limit_s` is how long one computation may take. `start` it, and wrap each one."""

    def __init__(self, limit_s: float, *, on_hang: Callable[[float], None] | None = None) -> None:
        self.limit_s = limit_s
        self._on_hang = on_hang or _end_process
        self._num_begun = 0
        self._is_computing = False
        self._seen = 0  # the computation that the last look saw
        self._num_looks = 0  # that saw the same

    def start(self) -> None:
        threading.Thread(target=self._run, name="cellpipe-watchdog", daemon=True).start()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """What happens inside is one computation."""
        self._num_begun += 1
        self._is_computing = True
        try:
            yield
        finally:
            self._is_computing = False

    def look(self) -> None:
        """Called at equal intervals, `LOOKS_PER_LIMIT` in the time a computation may take."""
        if not self._is_computing or self._num_begun != self._seen:
            self._seen, self._num_looks = self._num_begun, 0
            return
        self._num_looks += 1
        if self._num_looks > LOOKS_PER_LIMIT:
            self._num_looks = 0
            self._on_hang(self.limit_s)

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(self.limit_s / LOOKS_PER_LIMIT):
            self.look()


def _end_process(limit_s: float) -> None:
    log.error("compute_hung", limit_s=limit_s, exit_code=EXIT_HUNG)
    os._exit(EXIT_HUNG)
