"""Message ids: which publish of a channel a message is, and when it was handed over. Pure."""

from __future__ import annotations

import re
import time

_ID = re.compile(r"(\d{1,19})-(\d{1,16})", re.ASCII)


def unix_us() -> int:
    return time.time_ns() // 1000


def message_id(tag: int, handed_over_unix_us: int) -> str:
    """A return names no delivery tag: this is how it finds its message."""
    return f"{tag}-{handed_over_unix_us}"


def tag_of(message_id: str) -> int:
    """Of an id that `message_id` made."""
    return int(message_id.partition("-")[0])


def sent_unix_us(message_id: str | None) -> int:
    """When it was handed over; 0 for the ids of other publishers."""
    match = _ID.fullmatch(message_id) if message_id else None
    return int(match[2]) if match else 0
