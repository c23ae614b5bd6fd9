"""Where the time of decode steps goes, as running sums. Knows no queue, store or kernel.

A turn is a row of laps: each moment between its start and its last ack belongs to one stage, and a
step that shares a batch waits for all of the batch. Beside those stand what came before the turn:
on the way, in this process, decoding. Costs a few microseconds a step, and so is always on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from operator import add

from services.worker.batch import Slice
from shared.store.presence_types import STAGES

BROKER, QUEUE, DECODE, PREPARE, COMPUTE, REDIS, PUBLISH, CONFIRM, SETTLE = range(len(STAGES))


def unix_us() -> int:
    return time.time_ns() // 1000


class Stages:
    """Sums over all decode steps of one worker; steps of a prompt are left out."""

    __slots__ = (
        "_began_unix_us", "_clock_ns", "_mark_ns", "_sums_ns", "_turn_ns", "_unix_us", "num_steps",
        "num_turns",
    )  # fmt: skip

    def __init__(
        self,
        *,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        unix_us: Callable[[], int] = unix_us,
    ) -> None:
        self._clock_ns = clock_ns
        self._unix_us = unix_us
        self.num_turns = 0
        self.num_steps = 0
        self._sums_ns = [0] * len(STAGES)
        self._turn_ns = [0] * len(STAGES)
        self._mark_ns = 0
        self._began_unix_us = 0

    def begin(self) -> None:
        """A turn starts; one that was not ended counts for nothing."""
        self._turn_ns = [0] * len(STAGES)
        self._mark_ns = self._clock_ns()
        self._began_unix_us = self._unix_us()

    def lap(self, stage: int) -> None:
        """What passed since the last lap belongs to a stage."""
        now_ns = self._clock_ns()
        self._turn_ns[stage] += now_ns - self._mark_ns
        self._mark_ns = now_ns

    def end(self, slices: Iterable[Slice]) -> None:
        """The turn computed these."""
        num_steps = arriving_us = waiting_us = decoding_ns = 0
        for piece in slices:
            item = piece.pending
            if item.step.num_positions > 1:
                continue
            num_steps += 1
            delivery = item.delivery
            if arrived_us := delivery.arrived_unix_us:
                decoding_ns += item.decode_ns
                waiting_us += self._began_unix_us - arrived_us
                if sent_us := delivery.sent_unix_us:
                    # By two machines' clocks if there are two: then it holds their difference.
                    arriving_us += arrived_us - sent_us
        if num_steps:
            self.num_turns += 1
            self.num_steps += num_steps
            turn_ns = self._turn_ns
            if num_steps > 1:
                turn_ns = [spent_ns * num_steps for spent_ns in turn_ns]
            sums_ns = list(map(add, self._sums_ns, turn_ns))
            sums_ns[BROKER] += arriving_us * 1000
            sums_ns[QUEUE] += waiting_us * 1000 - decoding_ns
            sums_ns[DECODE] += decoding_ns
            self._sums_ns = sums_ns

    def totals_us(self) -> tuple[int, ...]:
        """Microseconds of all decode steps together, in the order of `STAGES`."""
        return tuple(spent_ns // 1000 for spent_ns in self._sums_ns)
