"""What the operating system says of this process. Knows nothing of cellpipe."""

from __future__ import annotations

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")


def rss_bytes() -> int:
    """Resident memory now; 0 where there is no /proc (macOS, BSD)."""
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Largest resident memory so far; 0 where there is no /proc.

    Not getrusage's ru_maxrss, which a process inherits from the one that started it.
    """
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
