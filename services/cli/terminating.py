"""SIGTERM for commands that start servers and workers of their own: those end with them."""

from __future__ import annotations

import signal
from types import FrameType


def end_clean_at_sigterm() -> None:
    """From now on SIGTERM unwinds the stack, as Ctrl-C does, and the exit code is 143.

    Another one while things are ended is ignored: it would leave them running.
    """

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
