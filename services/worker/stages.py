"""Where the time of decode steps goes, as running sums. Knows no queue, store or kernel.

A turn is a row of laps: each moment between its start and its last ack belongs to one stage, and a
step that shares a batch waits for all of the batch. Beside those stand what came before the turn:
on the way, in this process, decoding. Costs a few microseconds a step, and so is always on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final

from services.worker.batch import Pending, Slice
from shared.broker.base import Delivery, Headers
from shared.store.presence_types import STAGES

BROKER, QUEUE, DECODE, PREPARE, COMPUTE, REDIS, PUBLISH, CONFIRM, SETTLE = range(len(STAGES))
SENT_HEADER: Final = "sent-us"


class Stages:
    """Sums over all decode steps of one worker; steps of a prompt are left out."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.num_steps = 0
        self._sums_ns = [0] * len(STAGES)
        self._turn_ns = [0] * len(STAGES)
        self._mark_ns = 0
        self._began_unix_us = 0

    def begin(self) -> None:
        """A turn starts; one that was not ended counts for nothing."""
        self._turn_ns = [0] * len(STAGES)
        self._mark_ns = time.perf_counter_ns()
        self._began_unix_us = unix_us()

    def lap(self, stage: int) -> None:
        """What passed since the last lap belongs to a stage."""
        now_ns = time.perf_counter_ns()
        self._turn_ns[stage] += now_ns - self._mark_ns
        self._mark_ns = now_ns

    def end(self, slices: Iterable[Slice]) -> None:
        """The turn computed these."""
        items = [piece.pending for piece in slices if piece.pending.step.num_positions == 1]
        if not items:
            return
        self.num_turns += 1
        self.num_steps += len(items)
        sums_ns = self._sums_ns
        for stage, spent_ns in enumerate(self._turn_ns):
            sums_ns[stage] += spent_ns * len(items)
        for item in items:
            self._add_arrival(item)

    def totals_us(self) -> tuple[int, ...]:
        """Microseconds of all decode steps together, in the order of `STAGES`."""
        return tuple(spent_ns // 1000 for spent_ns in self._sums_ns)

    def _add_arrival(self, item: Pending) -> None:
        arrived_unix_us = item.delivery.arrived_unix_us
        if not arrived_unix_us:
            return
        sums_ns = self._sums_ns
        sums_ns[DECODE] += item.decode_ns
        sums_ns[QUEUE] += (self._began_unix_us - arrived_unix_us) * 1000 - item.decode_ns
        if sent_unix_us := sent_at(item.delivery):
            # By two machines' clocks if there are two: then it holds their difference.
            sums_ns[BROKER] += (arrived_unix_us - sent_unix_us) * 1000


def unix_us() -> int:
    return time.time_ns() // 1000


def sent_now() -> Headers:
    """What tells the receiver when a message left."""
    return ((SENT_HEADER, str(unix_us())),)


def sent_at(delivery: Delivery) -> int:
    """Unix microseconds; 0 when the sender said nothing that can be read."""
    for name, text in delivery.headers:
        if name == SENT_HEADER and text.isascii() and text.isdigit() and len(text) < 20:
            return int(text)
    return 0
