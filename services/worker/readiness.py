"""Decides which slices of a batch may be computed now. Knows no kernel and publishes nothing.

Not those that somebody passed on, whose deadline is over, whose KV rows are not to be had, or that
killed too often; those are settled or parked here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from services.worker.batch import Slice
from services.worker.endings import Endings
from services.worker.inbox import Inbox
from services.worker.limits import WorkerLimits
from services.worker.sequences import SequencePool
from services.worker.suspects import Suspects
from shared.errors import ErrorCode, KernelError, KvMissing, StoreDamaged
from shared.messages import Step
from shared.store.shared_clock import SharedClock


class Readiness:
    """The last look before a worker computes. `embedded`: no scheduler sends a lost step again."""

    def __init__(
        self,
        *,
        pool: SequencePool,
        inbox: Inbox,
        suspects: Suspects,
        endings: Endings,
        limits: WorkerLimits,
        is_repeat: Callable[[Step], bool],
        embedded: bool,
        clock: Callable[[], float],
        time_of_day: SharedClock,
    ) -> None:
        self._pool = pool
        self._inbox = inbox
        self._suspects = suspects
        self._endings = endings
        self._limits = limits
        self._is_repeat = is_repeat
        self._embedded = embedded
        self._clock = clock
        self._time_of_day = time_of_day

    def ready(self, slices: Sequence[Slice]) -> list[Slice]:
        """The slices whose earlier KV rows are here or could be read; the others are parked."""
        ready = []
        now_s, now_unix_ms = self._clock(), self._time_of_day.unix_ms()
        for piece in slices:
            item = piece.pending
            if self._is_repeat(item.step):  # its twin was passed on while it waited
                self._inbox.ack(item)
                continue
            if 0 < item.step.deadline_unix_ms <= now_unix_ms:
                reason = "the request's deadline has passed"
                self._endings.fail(item, reason, code=ErrorCode.DEADLINE)
                continue
            try:
                self._pool.top_up(
                    piece.group,
                    piece.request_id,
                    piece.position,
                    accepted=piece.accepted,
                    now_s=now_s,
                )
            except KvMissing as error:
                if item.stays:  # its rows were evicted: begin again where the store has them
                    self._inbox.hand_back([item])
                    continue
                # A step can overtake its predecessor, which another worker of the group still
                # computes: its rows come within one step's time or not at all. Or it is a late
                # copy, of a request whose rows were deleted at its end.
                if item.parked_since_s is None and self._suspects.is_over(item):
                    self._inbox.ack(item)
                    continue
                waited_s = item.park(now_s=now_s, retry_s=self._limits.park_retry_s)
                if waited_s > self._limits.park_limit_s and self._embedded:
                    self._endings.fail(item, str(error), code=ErrorCode.LOST)
                elif waited_s > self._limits.park_limit_s:
                    self._suspects.outlived(item)
                    self._inbox.ack(item)  # the scheduler sends again what the rows came from
                continue
            except (KernelError, StoreDamaged) as error:
                reason = f"KV rows in the store are damaged: {error}"
                self._endings.fail(item, reason, dead=True, code=ErrorCode.LOST)
                continue
            item.parked_since_s = None
            if self._endings.may_compute(item):
                ready.append(piece)
        return ready


def unix_ms() -> int:
    """This machine's time of day."""
    return time.time_ns() // 1_000_000
