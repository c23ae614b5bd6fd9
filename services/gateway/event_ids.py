"""Ids of server-sent events: how far their reader is, so that any gateway can go on. Pure.

`chatcmpl-…/12,9f` says that the answer's first choice was shown up to its 12th token, and the
second, of 9 tokens, to its end; `-` is a choice of which nothing was shown, `0` one that was
opened. A `u` at the end: with the usage; `d`: all of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.api.errors import ApiError

COMPLETION_ID = re.compile(r"(?:chatcmpl|cmpl)-[0-9a-f]{24}\Z")
_EVENT_ID = re.compile(
    r"((?:chatcmpl|cmpl)-[0-9a-f]{24})/((?:-|\d{1,7}f?)(?:,(?:-|\d{1,7}f?)){0,4095})([ud]?)\Z"
)


@dataclass(frozen=True, slots=True)
class Shown:
    """What was shown of one choice: -1 nothing, else so many tokens; and whether its end was."""

    num_tokens: int = -1
    is_finished: bool = False

    def __str__(self) -> str:
        if self.num_tokens < 0:
            return "-"
        return f"{self.num_tokens}{'f' if self.is_finished else ''}"


@dataclass(frozen=True, slots=True)
class EventId:
    completion_id: str
    shown: tuple[Shown, ...]
    tail: str = ""

    def __str__(self) -> str:
        return f"{self.completion_id}/{','.join(map(str, self.shown))}{self.tail}"


def read_event_id(text: str) -> EventId:
    """The id that a client sent back. Raises `ApiError` for one that is not ours."""
    match = _EVENT_ID.match(text)
    if match is None:
        raise ApiError(400, "Last-Event-ID is none of this server's", param="Last-Event-ID")
    shown = tuple(
        Shown() if part == "-" else Shown(int(part.rstrip("f")), part.endswith("f"))
        for part in match[2].split(",")
    )
    return EventId(match[1], shown, match[3])
