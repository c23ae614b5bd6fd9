"""Ends requests that cannot go on, by name. Knows no kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable

import structlog

from services.worker.batch import Pending
from services.worker.inbox import Inbox
from services.worker.suspects import Drop, Go, Poison, Suspects, Wait
from shared.errors import ErrorCode, StoreDamaged
from shared.messages import FinishReason
from shared.store.ledger_base import RequestLedger

log = structlog.get_logger()

SUSPECT_RETRY_S = 0.5
# For tokens whose predecessors are not on record. Whoever sent their step was to put them there
# first, and tries again for seconds.
EARLY_RETRY_S, EARLY_LIMIT_S = 0.05, 2.0


class Endings:
    """What becomes of a step that is not passed on. `forget` drops what is held of a request."""

    def __init__(
        self,
        inbox: Inbox,
        ledger: RequestLedger,
        suspects: Suspects,
        *,
        forget: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._inbox = inbox
        self._ledger = ledger
        self._suspects = suspects
        self._forget = forget
        self._clock = clock

    def may_compute(self, item: Pending) -> bool:
        """Whether the item may be computed now; if not, it is settled, or looked at again."""
        match self._suspects.admit(item):
            case Go():
                return True
            case Drop():
                self._inbox.ack(item)
            case Wait():
                item.retry_at_s = self._clock() + SUSPECT_RETRY_S
            case Poison(num_attempts=num_attempts, workers=workers):
                reason = (
                    f"layer group {item.step.group} died {num_attempts} times of the step at "
                    f"position {item.step.position}"
                )
                self.fail(item, reason, dead=True, num_attempts=num_attempts, workers=workers)
        return False

    def postpone(self, item: Pending) -> None:
        """Compute it again soon: the tokens before its own are not on record yet.

        If they do not come the step is dropped, and the scheduler sends again what is missing.
        """
        now_s = self._clock()
        if item.early_since_s is None:
            item.early_since_s = now_s
        item.is_early = now_s - item.early_since_s < EARLY_LIMIT_S
        item.retry_at_s = now_s + EARLY_RETRY_S
        log.debug("step_early", request_id=item.step.request_id, position=item.step.position)

    def fail(
        self,
        item: Pending,
        reason: str,
        *,
        dead: bool = False,
        code: ErrorCode = ErrorCode.FAILED,
        num_attempts: int = 1,
        workers: tuple[str, ...] = (),
    ) -> None:
        """End the request with a named error; `dead` keeps its message for inspection."""
        step = item.step
        try:
            ended_now = self._ledger.finish(step.request_id, FinishReason.ERROR, reason, code)
        except StoreDamaged:  # its record is not one any more; the scheduler buries it
            ended_now = False
        log.log(
            logging.ERROR if ended_now else logging.DEBUG,
            "request_failed" if ended_now else "late_step_dropped",
            request_id=step.request_id,
            group=step.group,
            position=step.position,
            reason=reason,
        )
        self._forget(step.request_id)
        self._suspects.done(item)
        if dead:
            self._inbox.dead_letter(item, reason, num_attempts=num_attempts, workers=workers)
        else:
            self._inbox.ack(item)
