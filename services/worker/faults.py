"""Faults that tests order: at a named place of a step, this process dies, freezes, hangs or slows.

Read from `CELLPIPE_TEST_FAULTS` by the entry point; without it no worker holds a `Faults` and
nothing is checked. Orders are separated by `;`, each `ACTION@POINT[:CONDITION,CONDITION...]`:

    kill@commit:3                        SIGKILL to itself, the third time it gets there
    freeze@publish:request_id=r-1        SIGSTOP to itself, each time that request gets there
    crash@compute:request_id=r-x         abort(), as a kernel that writes out of bounds ends
    hang@compute:group=1,seconds=40      a computation that does not end (for ever, or so long)
    slow@compute:seconds=0.05            so much longer, every time

A condition is a number (only that time, from 1), `request_id=`, `group=`, `seconds=` or `file=`:
each time that such a file appears, which is then removed. Without any, `slow` acts every time and
the others the first time. Knows no queue, store or kernel.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from services.worker.batch import Slice
from shared.errors import ConfigError

VARIABLE: Final = "CELLPIPE_TEST_FAULTS"


class Point(StrEnum):
    """A place in a step. All but `compute` (just before it) come after what they are named for."""

    RECEIVE = "receive"
    COMPUTE = "compute"
    WRITE = "write"  # KV rows are in the store
    COMMIT = "commit"  # the token is on its way to the record
    PUBLISH = "publish"  # the next message left, unconfirmed, if it does not wait for the record
    CONFIRM = "confirm"  # it is confirmed, this one not yet acked


class Action(StrEnum):
    KILL = "kill"
    FREEZE = "freeze"
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"


@dataclass(slots=True)
class Fault:
    """One order. `nth` 0 is every time; `seconds` None is for ever; "" and None match all."""

    action: Action
    point: Point
    nth: int = 0
    request_id: str = ""
    group: int | None = None
    seconds: float | None = None
    file: str = ""
    num_hits: int = 0

    def fires(self, point: Point, group: int, request_ids: Collection[str]) -> bool:
        """Count this visit if it is meant; whether the fault acts now."""
        if point is not self.point or self.group not in (None, group):
            return False
        if self.request_id and self.request_id not in request_ids:
            return False
        if self.file:
            try:
                os.unlink(self.file)
            except FileNotFoundError:
                return False
        self.num_hits += 1
        return self.nth in (0, self.num_hits)


class Faults:
    """The orders of one process."""

    def __init__(
        self,
        faults: Iterable[Fault],
        *,
        act: Callable[[Fault], None] | None = None,
    ) -> None:
        self._faults = list(faults)
        self._act = act or perform

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Faults | None:
        """The faults that a test ordered, None without any. Raises `ConfigError`."""
        text = environ.get(VARIABLE, "")
        return cls(parse_faults(text)) if text else None

    def hit(self, point: Point, group: int, request_ids: Collection[str]) -> None:
        """A step of these requests is at this point."""
        for fault in self._faults:
            if fault.fires(point, group, request_ids):
                self._act(fault)


def reached(faults: Faults | None, point: Point, slices: Sequence[Slice]) -> None:
    """The slices of a batch are at this point."""
    if faults is not None:
        faults.hit(point, slices[0].group, {piece.request_id for piece in slices})


def parse_faults(text: str) -> list[Fault]:
    """The orders in a text. Raises `ConfigError` naming what it does not know."""
    return [_parse_one(part.strip()) for part in text.split(";") if part.strip()]


def _parse_one(text: str) -> Fault:
    what, _, conditions = text.partition(":")
    action, _, point = what.partition("@")
    if action not in list(Action) or point not in list(Point):
        raise ConfigError(
            f"{VARIABLE}: {text!r:.80} must be ACTION@POINT, ACTION one of {', '.join(Action)} "
            f"and POINT one of {', '.join(Point)}"
        )
    fault = Fault(Action(action), Point(point))
    for condition in filter(None, (part.strip() for part in conditions.split(","))):
        _add_condition(fault, condition)
    if (
        not fault.request_id
        and not fault.file
        and not fault.nth
        and fault.action is not Action.SLOW
    ):
        fault.nth = 1
    return fault


def _add_condition(fault: Fault, text: str) -> None:
    name, _, value = text.rpartition("=")
    try:
        match name:
            case "" if int(value) >= 1:
                fault.nth = int(value)
                return
            case "request_id" if value:
                fault.request_id = value
                return
            case "file" if value:
                fault.file = value
                return
            case "group" if int(value) >= 0:
                fault.group = int(value)
                return
            case "seconds" if 0 <= float(value) <= 86_400:
                fault.seconds = float(value)
                return
    except ValueError:
        pass
    raise ConfigError(
        f"{VARIABLE}: condition {text!r:.80} must be a number from 1, request_id=, group=, "
        "seconds= or file="
    )


def perform(fault: Fault) -> None:
    """Do it to this process. Returns after a freeze that was continued, and when time is over."""
    match fault.action:
        case Action.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Action.FREEZE:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Action.CRASH:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no core files of ordered deaths
            os.abort()
        case Action.HANG if fault.seconds is None:
            while True:
                time.sleep(3600)
        case Action.HANG | Action.SLOW:
            time.sleep(fault.seconds or 0.0)
