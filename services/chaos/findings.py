"""What is left when the load is over: answers on record, messages, keys, dead letters, deaths."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from services.chaos.faults import FaultLog
from services.chaos.schedule import FaultKind, FaultPlan
from services.chaos.verdict import Observation, Verdict
from shared.broker.base import Broker
from shared.dead_queue import DeadQueue, Letter
from shared.errors import TransientError
from shared.local_cluster.load import Question, Sighting
from shared.local_cluster.processes import OwnDeath
from shared.messages import FinishReason
from shared.store.connection import Stores
from shared.store.ledger_base import START, RequestLedger
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.store.leftovers import leftover_keys

SETTLE_S = 15.0
BROKER_RESTART = f"{FaultKind.RESTART} broker"


def wait_until_settled(
    broker: Broker,
    stores: Stores,
    queues: Sequence[str],
    sightings: Sequence[Sighting],
    *,
    tend: Callable[[float], None],
) -> list[str]:
    """Give what still runs a moment to end; returns the keys that are left."""
    request_ids = [s.request_id for s in sightings if s.finished_s is not None]
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        tend(time.monotonic())
        try:
            left = leftover_keys(stores, request_ids)
            waiting = sum(broker.depth(queue) or 0 for queue in queues)
        except TransientError:
            if time.monotonic() > deadline_s:
                raise
            left, waiting = [], 1
        if (not left and not waiting) or time.monotonic() > deadline_s:
            return left
        time.sleep(0.2)


def observe(
    sightings: Sequence[Sighting],
    questions: Sequence[Question],
    expected: Sequence[tuple[int, ...]],
    ledger: RequestLedger,
) -> list[Observation]:
    """Put what each client saw beside what is on record now."""
    on_record = ledger.states([sighting.request_id for sighting in sightings])
    observations = []
    for sighting in sightings:
        events = ledger.events(sighting.request_id, START, count=100_000)
        ends = [event for event in events if isinstance(event, FinalEvent)]
        failed = bool(ends) and ends[0].finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        observations.append(
            Observation(
                request_id=sighting.request_id,
                num_prompt=len(questions[sighting.question].prompt),
                expected=expected[sighting.question],
                is_accepted=sighting.is_accepted,
                submitted_s=sighting.submitted_s,
                seen=tuple(sighting.tokens),
                stored=tuple(
                    (event.position, event.token_id)
                    for event in events
                    if isinstance(event, TokenEvent)
                ),
                num_ends=len(ends),
                ends_last=not ends or events[-1] is ends[-1],
                is_on_record=sighting.request_id in on_record,
                failure=(ends[0].error or str(ends[0].finish_reason)) if failed else "",
            )
        )
    return observations


def wait_for_letters(
    dead_queue: DeadQueue, before: Collection[str], garbage: Collection[bytes]
) -> list[Letter]:
    """The letters that are not `before`, once all `garbage` has its own, or a moment has passed."""
    deadline_s = time.monotonic() + SETTLE_S
    while True:
        letters = [letter for letter in dead_queue.letters() if letter.letter_id not in before]
        bodies = {letter.body for letter in letters}
        if time.monotonic() > deadline_s or bodies.issuperset(garbage):
            return letters
        time.sleep(0.2)


def judge_leftovers(
    verdict: Verdict,
    plans: Sequence[FaultPlan],
    log: FaultLog,
    own_deaths: Sequence[OwnDeath],
    leaked: Sequence[str],
    letters: Sequence[Letter],
) -> None:
    for queue, left in verdict.queues.items():
        if left:
            verdict.problems.append(f"{left} messages are left in {queue}")
    if leaked:
        verdict.problems.append(f"{len(leaked)} keys are left in Redis, the first: {leaked[0]}")
        verdict.named["leaked"] = list(leaked)
    _judge_letters(verdict, log, letters)
    for death in own_deaths:
        verdict.named.setdefault("died by itself", []).append(f"{death.name} ({death.exit_code})")
        if "Traceback" in death.log_tail:
            verdict.problems.append(f"{death.name} crashed: {death.log_tail[-600:]}")
    came = {fault.name for fault in log.injected}
    for plan in plans:
        if plan.name not in came:
            verdict.named.setdefault("never came", []).append(
                f"{plan.name} each {plan.period_s:g} s: the load was over, or nobody to spare"
            )
    if log.put_off:
        verdict.named["left out"] = list(log.put_off)


def _judge_letters(verdict: Verdict, log: FaultLog, letters: Sequence[Letter]) -> None:
    """All that is dead must be our garbage, and all our garbage dead.

    When the broker was killed a letter may have come twice: the worker had published it, and its
    ack of the garbage was lost. One that the broker moved by itself may then not have come.
    """
    bodies = {letter.body for letter in letters}
    verdict.expected_dead_letters = len(log.garbage)
    verdict.dead_letters = len(bodies)
    if missing := log.garbage - bodies:
        verdict.named["garbage without a dead letter"] = [repr(body) for body in sorted(missing)]
        if not any(fault.name == BROKER_RESTART for fault in log.injected):
            verdict.problems.append(f"{len(missing)} garbage messages are gone without a letter")
    if ghosts := bodies & log.withdrawn:
        verdict.problems.append(f"{len(ghosts)} messages came although they were given up unsent")
    ours = log.garbage | log.unconfirmed | log.withdrawn
    for letter in letters:
        if letter.body not in ours:
            why = letter.history.reason or letter.error or letter.problem
            verdict.problems.append(
                f"dead letter {letter.letter_id} ({letter.kind} of {letter.request_id}): {why}"
            )
