"""When which fault comes, drawn from a seed. Pure: knows no process and no clock.

A fault is asked for as target:period, `worker:2s`, with an optional count, `scheduler:20s:1`. Each
comes about once a period, a quarter of it early or late, so that faults do not come in step.
"""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from shared.config import parse_duration
from shared.errors import ConfigError
from shared.local_cluster.servers import EVERYTHING

JITTER = 0.25  # of a period


class FaultKind(StrEnum):
    """What is done. Each names its option."""

    KILL = "kill"
    STOP = "stop"
    FREEZE = "freeze"
    RESTART = "restart"
    GARBAGE = "garbage"
    HANG = "hang"


TARGETS: dict[FaultKind, tuple[str, ...]] = {
    FaultKind.KILL: ("worker", "scheduler"),
    FaultKind.STOP: ("worker", "scheduler"),
    FaultKind.FREEZE: ("worker", "scheduler"),
    FaultKind.RESTART: ("broker", "redis", "meta", EVERYTHING),
    FaultKind.GARBAGE: ("queue",),
    FaultKind.HANG: ("worker",),
}


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One fault that comes again and again, at most `max_times` times (None: no bound)."""

    kind: FaultKind
    target: str
    period_s: float
    max_times: int | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that is due `at_s` seconds after the start; `draw` in 0..1 picks its victim."""

    at_s: float
    kind: FaultKind
    target: str
    draw: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"


def parse_fault(kind: FaultKind, text: str) -> FaultPlan:
    """Read "worker:2s" or "worker:2s:1"; a kind with one target may leave it out ("5s").

    Raises `ConfigError` naming the option and the text.
    """
    targets = TARGETS[kind]
    parts = text.strip().split(":")
    if len(targets) == 1 and parts[0] not in targets:
        parts.insert(0, targets[0])
    target = parts[0]
    if target not in targets or len(parts) not in (2, 3):
        raise ConfigError(
            f"--{kind} must be {'|'.join(targets)}:PERIOD[:TIMES], such as {targets[0]}:10s, "
            f"got {text!r}"
        )
    max_times = None
    if len(parts) == 3:
        if not re.fullmatch(r"[1-9]\d{0,5}", parts[2]):
            raise ConfigError(f"--{kind} {text!r}: times must be a positive number")
        max_times = int(parts[2])
    return FaultPlan(kind, target, parse_duration(parts[1], field=f"--{kind}"), max_times)


def faults_of(plans: Sequence[FaultPlan], seed: int) -> Iterator[Fault]:
    """All faults in order of time. The same plans and seed give the same faults, for ever."""
    streams = [_stream(plan, f"{seed}/{number}/{plan.name}") for number, plan in enumerate(plans)]
    return heapq.merge(*streams, key=lambda fault: fault.at_s)


def _stream(plan: FaultPlan, seed: str) -> Iterator[Fault]:
    rng = random.Random(seed)
    for number in count(1):
        if plan.max_times is not None and number > plan.max_times:
            return
        at_s = plan.period_s * (number + rng.uniform(-JITTER, JITTER))
        yield Fault(at_s, plan.kind, plan.target, rng.random())
