"""A node that fails again and again takes breaks that grow; an input that fails does not count."""

from __future__ import annotations

from shared.quarantine import FIRST_BREAK_S, GOOD_AGAIN, MAX_BREAK_S, Quarantine
from tests.rig import Rig
from tests.steps import OTHERS, a_step, finish_others, hidden, start_others


def fail(quarantine: Quarantine, *request_ids: str) -> None:
    for request_id in request_ids:
        quarantine.failed(request_id)


def test_different_requests_in_a_row_are_the_nodes_fault() -> None:
    quarantine = Quarantine()

    fail(quarantine, "a", "b")
    assert not quarantine.is_due
    fail(quarantine, "c")

    assert quarantine.is_due
    assert quarantine.num_failures == 3


def test_one_request_that_fails_often_is_its_own_fault() -> None:
    quarantine = Quarantine()

    fail(quarantine, *"aaaaaaaa")

    assert not quarantine.is_due


def test_a_success_between_failures_clears_the_node() -> None:
    quarantine = Quarantine()

    for name in "abcdefgh":
        quarantine.failed(name)
        quarantine.succeeded()

    assert not quarantine.is_due


def test_breaks_grow_to_a_limit_and_start_over_when_all_is_well() -> None:
    quarantine = Quarantine()

    breaks = [quarantine.begin() for _ in range(12)]
    for _ in range(GOOD_AGAIN):
        quarantine.succeeded()

    assert breaks[:3] == [FIRST_BREAK_S, 2 * FIRST_BREAK_S, 4 * FIRST_BREAK_S]
    assert breaks[-1] == MAX_BREAK_S
    assert quarantine.begin() == FIRST_BREAK_S


def test_a_worker_counts_what_it_could_not_compute() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    worker = rig.add_worker(1)
    for name in ("x", "y", "z"):
        rig.admit(name, (5,))
        rig.publish_step(a_step(rig, name, tensors=hidden(1e25)))

    rig.turn()

    assert worker.quarantine.num_failures == 3
    assert worker.quarantine.is_due
    start_others(rig)
    finish_others(rig)
    assert not worker.quarantine.is_due


def test_a_worker_on_a_break_holds_nothing_and_comes_back() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    worker = rig.add_worker(1)
    start_others(rig)
    rig.run_until(lambda: len(rig.tokens("a")) >= 3)

    worker.hand_back_all()
    for _ in range(5):
        rig.turn()
    assert worker.num_pending == 0
    num_tokens = len(rig.tokens("a"))

    worker.resume()
    finish_others(rig)
    assert len(rig.tokens("a")) > num_tokens
    assert len(OTHERS) == 2


def test_a_group_that_is_dropped_is_worked_off_by_others() -> None:
    rig = Rig(2)
    both = rig.add_worker(0, 1)
    start_others(rig)
    rig.run_until(lambda: len(rig.tokens("a")) >= 3)
    rig.add_worker(1)

    both.drop_group(1)
    del rig.peers["w1"]  # as presence tells it: without the group
    finish_others(rig)

    assert both.groups == (0,)
