"""Stops inputs that kill workers. Knows no kernel and settles nothing.

A delivery that was delivered before, or was handed over from another queue, may have killed the
worker that had it: it is a suspect, is computed alone, and the attempt is marked before. Two marks
of processes that never came back, and the first delivery that none marked, make three attempts.
A mark of a process that lives is none: it may only have lost its connection. Presence tells of a
death late, so where it matters the suspect waits until it must have told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from services.worker.batch import Pending
from shared.errors import StoreDamaged, StoreUnavailable
from shared.store.attempts import Attempts, StepName
from shared.store.ledger_base import RequestLedger
from shared.store.presence_types import WorkerInfo

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Go:
    """Compute it."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody needs it any more: its request has ended, or was started anew."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Whether those who began it have died is not known yet."""


@dataclass(frozen=True, slots=True)
class Poison:
    """It has killed too often. `workers` began it and did not come back."""

    num_attempts: int
    workers: tuple[str, ...]


class Suspects:
    """The attempts of one worker. `attempts` None is the embedded mode: one process, no heirs."""

    def __init__(
        self,
        attempts: Attempts | None,
        ledger: RequestLedger,
        *,
        worker_id: str,
        max_attempts: int,
        patience_s: float,
        read_peers: Callable[[], Sequence[WorkerInfo]],
        clock: Callable[[], float],
        unix_ms: Callable[[], int],
    ) -> None:
        """`patience_s`: after it presence shows nobody who died before."""
        self._attempts = attempts
        self._ledger = ledger
        self._worker_id = worker_id
        self._max_attempts = max_attempts
        self._patience_s = patience_s
        self._read_peers = read_peers
        self._clock = clock
        self._unix_ms = unix_ms

    def admit(self, item: Pending) -> Go | Drop | Wait | Poison:
        """Decide on an item that is to be computed next, and mark the attempt.

        Raises `StoreUnavailable`: without a mark it is not computed.
        """
        if self._attempts is None or not item.is_suspect or item.is_marked:
            return Go()
        if self.is_over(item):
            return Drop()
        name = _name(item)
        try:
            others = self._attempts.begin(name, self._worker_id, now_unix_ms=self._unix_ms())
        except StoreDamaged:  # whatever is there, it is no mark of ours
            self._attempts.forget(name)
            others = ()
        item.is_marked = True
        if 1 + len(others) < self._max_attempts:
            return Go()
        alive = {peer.worker_id for peer in self._read_peers()}
        died = tuple(worker_id for worker_id in others if worker_id not in alive)
        if 1 + len(died) >= self._max_attempts:
            return Poison(1 + len(died), died)
        now_s = self._clock()
        if item.suspected_since_s is None:
            item.suspected_since_s = now_s
        if now_s - item.suspected_since_s < self._patience_s:
            self._clear(item, forget=False)
            return Wait()
        return Go()

    def is_over(self, item: Pending) -> bool:
        """Whether its request has ended, or was started anew: then nobody needs it."""
        step = item.step
        state = self._ledger.states([step.request_id]).get(step.request_id)
        return state is not None and (state.finish_reason is not None or state.epoch > step.epoch)

    def done(self, item: Pending) -> None:
        """It was computed and passed on, or buried."""
        self._clear(item, forget=True)

    def outlived(self, item: Pending) -> None:
        """It was not done, but not for a crash either."""
        self._clear(item, forget=False)

    def _clear(self, item: Pending, *, forget: bool) -> None:
        if self._attempts is None or not item.is_marked:
            return
        item.is_marked = False
        try:
            if forget:
                self._attempts.forget(_name(item))
            else:
                self._attempts.end(_name(item), self._worker_id)
        except (StoreUnavailable, StoreDamaged) as error:
            # The mark is our own: it counts against the step only if this process dies later.
            log.warning("attempt_not_cleared", request_id=item.step.request_id, reason=str(error))


def _name(item: Pending) -> StepName:
    step = item.step
    return StepName(step.request_id, step.layout_id, step.group, step.position)
