"""Which dead letters a chaos run may find, and which are a problem."""

from __future__ import annotations

from services.chaos.faults import FaultLog
from services.chaos.findings import BROKER_RESTART, judge_leftovers, wait_for_letters
from services.chaos.verdict import Injected, Verdict
from shared.broker.base import Outgoing
from shared.dead_queue import DeadQueue, Letter
from shared.topology import DEAD_QUEUE
from tests.rig import Rig

RESTARTED = Injected(BROKER_RESTART, 1.0, 2.0)


def letter(body: bytes) -> Letter:
    return Letter(body.hex(), "garbage", "", len(body), body=body)


def judged(log: FaultLog, *bodies: bytes) -> Verdict:
    verdict = Verdict()
    judge_leftovers(verdict, [], log, [], [], [letter(body) for body in bodies])
    return verdict


def test_a_letter_that_came_twice_counts_once() -> None:
    log = FaultLog(injected=[RESTARTED], garbage={b"a", b"b"})

    verdict = judged(log, b"a", b"b", b"a")

    assert verdict.is_clean
    assert verdict.dead_letters == verdict.expected_dead_letters == 2


def test_garbage_without_a_letter_is_a_problem_unless_the_broker_was_killed() -> None:
    killed = FaultLog(injected=[RESTARTED], garbage={b"a", b"b"})

    assert judged(killed, b"a").is_clean
    assert "garbage without a dead letter" in judged(killed, b"a").named
    assert not judged(FaultLog(garbage={b"a", b"b"}), b"a").is_clean


def test_what_we_did_not_send_or_was_given_up_is_a_problem() -> None:
    assert judged(FaultLog(unconfirmed={b"perhaps"}), b"perhaps").is_clean
    assert not judged(FaultLog(), b"foreign").is_clean
    assert not judged(FaultLog(withdrawn={b"never sent"}), b"never sent").is_clean


def test_letters_of_before_are_left_out() -> None:
    rig = Rig(1)
    dead_queue = DeadQueue(rig.new_broker(), rig.ledger)
    rig.front.publish([Outgoing(DEAD_QUEUE, b"old")]).wait(1.0)
    before = {letter.letter_id for letter in dead_queue.letters()}
    rig.front.publish([Outgoing(DEAD_QUEUE, b"new")]).wait(1.0)

    (found,) = wait_for_letters(dead_queue, before, {b"new"})

    assert found.body == b"new"
