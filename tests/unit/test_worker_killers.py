"""An input that ends the process that computes it: three attempts, a named error, a dead letter."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.faults import Fault, Faults, parse_faults
from services.worker.limits import WorkerLimits
from shared.broker.base import Delivery
from shared.dead_letters import DeadLetter
from shared.errors import StoreUnavailable
from shared.messages import FinishReason
from shared.store import keys
from shared.store.attempts import StepName
from shared.topology import DEAD_QUEUE
from tests.faults import Crash, Tripwire
from tests.rig import PEERS_TTL_S, Rig, assert_answers
from tests.rig_model import GREEDY, prompt_of
from tests.steps import OTHERS, a_step, start_others


def crash(_: Fault) -> None:
    raise Crash


def killers(text: str = "crash@compute:request_id=bad") -> Faults:
    return Faults(parse_faults(text), act=crash)


def run_with_respawn(rig: Rig, *groups: int, faults: Faults) -> None:
    """Until all have ended; a worker that died of the input is replaced."""
    waiting = ["bad", *(request_id for request_id, _, _ in OTHERS)]
    num_crashes = rig.num_crashes
    for _ in range(2_000):
        if all(rig.record(request_id).finish_reason for request_id in waiting):
            break
        rig.turn()
        for _ in range(rig.num_crashes - num_crashes):
            rig.add_worker(*groups, faults=faults)
        num_crashes = rig.num_crashes
    rig.run_until_quiet()


def dead_letters(rig: Rig) -> list[tuple[DeadLetter, Delivery]]:
    tap = rig.new_broker()
    tap.consume(DEAD_QUEUE, prefetch=100)
    found = []
    while (delivery := tap.take(0.0)) is not None:
        found.append((DeadLetter.of(delivery), delivery))
    return found


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_killer_input_takes_down_three_and_is_buried(group: int, num_workers: int) -> None:
    rig = Rig(2)
    rig.add_worker(1 - group)
    for _ in range(num_workers):
        rig.add_worker(group, faults=killers())

    rig.start("bad", prompt_of(6, salt=5))
    start_others(rig)
    run_with_respawn(rig, group, faults=killers())

    assert rig.num_crashes == 3
    (final,) = rig.final_events("bad")
    assert final.finish_reason is FinishReason.ERROR
    assert f"layer group {group} died 3 times" in final.error
    assert_answers(rig, OTHERS)
    ((letter, delivery),) = dead_letters(rig)
    assert (letter.request_id, letter.group, letter.attempts) == ("bad", group, 3)
    assert letter.reason == final.error
    assert letter.queue == rig.queue(group)
    assert len(set(letter.workers)) == 3  # two that died of a counted attempt, and the undertaker
    assert letter.died_unix_ms > 0
    assert delivery.body  # as it was, so that it can be sent again


def test_a_killer_in_the_middle_of_an_answer_keeps_the_tokens_before_it() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    rig.add_worker(1, faults=killers("crash@compute:request_id=bad,5"))
    rig.start("bad", prompt_of(6, salt=5))
    start_others(rig)

    run_with_respawn(rig, 1, faults=killers())

    assert rig.num_crashes == 3
    assert rig.final_events("bad")[0].num_generated == 4
    assert_answers(rig, OTHERS)


def test_a_step_that_comes_for_the_first_time_costs_no_mark() -> None:
    rig = Rig(2)
    spy = Tripwire(rig.attempts, "begin", Crash, times=0)
    rig.attempts = spy  # type: ignore[assignment]
    rig.add_workers()

    start_others(rig)
    rig.run_until_done(*(request_id for request_id, _, _ in OTHERS))

    assert spy.num_calls == 0


def test_a_suspect_that_is_computed_leaves_no_mark() -> None:
    rig = Rig(2)
    victim = rig.add_worker(0)
    rig.add_worker(1)
    start_others(rig)
    rig.run_until(lambda: len(rig.tokens("a")) >= 3)
    rig.kill(victim)
    spy = Tripwire(rig.attempts, "begin", Crash, times=0)
    rig.attempts = spy  # type: ignore[assignment]
    rig.add_worker(0)

    rig.run_until_done(*(request_id for request_id, _, _ in OTHERS))

    assert spy.num_calls >= 1
    assert_answers(rig, OTHERS)
    assert not rig.stores.meta.run(("KEYS", f"{keys.PREFIX}*:attempts:*"))


def test_an_outage_of_the_store_is_no_attempt() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    wire = Tripwire(rig.kv_pages, "start_writes", StoreUnavailable("down"), nth=2, times=8)
    rig.add_worker(1, kv_pages=wire)

    start_others(rig)
    rig.run_until_done(*(request_id for request_id, _, _ in OTHERS))

    assert wire.num_calls > 10
    assert_answers(rig, OTHERS)
    assert rig.num_dead() == 0


def test_a_suspect_of_a_request_that_has_ended_is_not_computed() -> None:
    rig = Rig(2)
    rig.add_worker(1, faults=killers("crash@receive:request_id=bad"))
    rig.admit("bad", (5,))
    rig.publish_step(a_step(rig, "bad"))
    rig.turn()
    assert rig.num_crashes == 1
    rig.ledger.finish("bad", FinishReason.ABORT)

    rig.add_worker(1, faults=killers())
    rig.run_until_quiet()

    assert rig.num_crashes == 1
    assert rig.num_dead() == 0


def test_garbage_in_an_inbox_is_buried_and_does_not_move_to_the_group() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    rig.add_worker(1)

    rig.publish("cellpipe.v2.inbox.w2.g1", b"\xc1 garbage")
    start_others(rig)
    rig.run_until_done(*(request_id for request_id, _, _ in OTHERS))

    ((letter, delivery),) = dead_letters(rig)
    assert (letter.queue, letter.workers) == ("cellpipe.v2.inbox.w2.g1", ("w2",))
    assert delivery.body == b"\xc1 garbage"


def test_more_attempts_may_be_allowed() -> None:
    rig = Rig(2, limits=WorkerLimits(max_attempts=5))
    rig.add_worker(0)
    rig.add_worker(1, faults=killers())

    rig.start("bad", prompt_of(6, salt=5))
    start_others(rig)
    run_with_respawn(rig, 1, faults=killers())

    assert rig.num_crashes == 5
    assert_answers(rig, OTHERS)


@pytest.mark.parametrize(
    "headers",
    [
        (),
        (("cellpipe-group", "x"), ("cellpipe-workers", "{"), ("cellpipe-attempts", "9" * 40)),
        (("cellpipe-workers", "[" * 10_000), ("cellpipe-group", "--")),
        (("cellpipe-workers", '{"a": 1}'), ("cellpipe-died-unix-ms", "²")),
    ],
)
def test_a_dead_letter_without_a_readable_history_is_read_all_the_same(headers: Any) -> None:
    delivery = Delivery("dead", b"x", False, "", "", "", None, headers, "first")

    assert DeadLetter.of(delivery) == DeadLetter("", queue="first")


def test_a_dead_letter_survives_its_headers() -> None:
    letter = DeadLetter("größe", "q", "r-1", 2, 3, ("a", "b"), 17)
    delivery = Delivery("dead", b"x", False, "", "", "", None, letter.headers(), "first")

    assert DeadLetter.of(delivery) == letter


@pytest.mark.parametrize(("num_dead", "is_poison"), [(0, False), (1, False), (2, True)])
def test_marks_of_processes_that_live_are_no_deaths(num_dead: int, is_poison: bool) -> None:
    # given two workers that began the step; those that live lost no more than their connection
    rig = Rig(2)
    markers = [rig.add_worker(1), rig.add_worker(1)]
    prompt = prompt_of(6)
    step = rig.start("a", prompt)
    name = StepName(step.request_id, step.layout_id, 0, 0)
    for worker in markers:
        rig.attempts.begin(name, worker.worker_id, now_unix_ms=1)
    rig.redeliver(rig.queue(0))
    for worker in markers[:num_dead]:
        rig.kill(worker)
    rig.add_worker(1)

    rig.add_worker(0)
    rig.run_until_done("a")

    if is_poison:
        assert "layer group 0 died 3 times" in rig.record("a").error
    else:
        assert_answers(rig, [("a", prompt, GREEDY)])


def test_a_death_is_not_called_poison_before_presence_could_tell_of_it() -> None:
    rig = Rig(2)
    doomed = [rig.add_worker(1), rig.add_worker(1)]
    step = rig.start("a", prompt_of(6))
    name = StepName(step.request_id, step.layout_id, 0, 0)
    for worker in doomed:
        rig.attempts.begin(name, worker.worker_id, now_unix_ms=1)
        rig.kill(worker)
    rig.redeliver(rig.queue(0))
    died_at_s = rig.clock()

    rig.add_worker(0)
    rig.run_until_done("a")

    assert rig.record("a").error
    assert PEERS_TTL_S < rig.clock() - died_at_s < PEERS_TTL_S + 1.0
