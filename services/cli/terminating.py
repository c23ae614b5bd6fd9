"""Signals that end a command: what it started and what it asked for ends with it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


def end_clean_at_sigterm() -> None:
    """From now on SIGTERM unwinds the stack, as Ctrl-C does, and the exit code is 143.

    Another one while things are ended is ignored: it would leave them running.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


@contextmanager
def noted_sigint() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: Python drops a KeyboardInterrupt that strikes in a finalizer."""
    pressed = threading.Event()

    def note(signum: int, frame: FrameType | None) -> None:
        pressed.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
