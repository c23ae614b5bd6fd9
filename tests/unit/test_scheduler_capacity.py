"""Requests run as far as the workers' memory holds their rows; others wait, or hear why not."""

from __future__ import annotations

import pytest

from services.scheduler.admission import ServedModel, kv_bytes_per_position
from services.scheduler.capacity import CapacityWatch
from shared.kv_budget import KvBudget
from shared.messages import FinishReason
from shared.store.presence_types import WorkerInfo, WorkerState
from tests.rig import Rig
from tests.rig_model import rig_tokenizer
from tests.unit.test_kv_budget import NUM_POSITIONS, submit


def model_of(rig: Rig) -> ServedModel:
    return ServedModel(rig.layout, rig.config, rig_tokenizer(), None)


def worker(rig: Rig, groups: tuple[int, ...], num_positions: int) -> WorkerInfo:
    """One whose cache holds so many positions of the groups that it serves."""
    num_layers = sum(rig.layout.num_layers(group) for group in groups)
    num_bytes = num_positions * num_layers * rig.config.kv_row_bytes_per_layer
    return WorkerInfo(
        f"w-{groups}-{num_positions}", groups, WorkerState.SERVING, kv_cache_bytes=num_bytes
    )


def look(rig: Rig, *peers: WorkerInfo) -> CapacityWatch:
    watch = CapacityWatch(lambda: peers, model_of(rig), every_s=1.0)
    watch.look(0.0)
    return watch


def test_the_group_with_the_least_room_counts() -> None:
    rig = Rig(2)
    per_position = kv_bytes_per_position(rig.config)

    watch = look(rig, worker(rig, (0,), 100), worker(rig, (1,), 30), worker(rig, (1,), 50))

    assert watch.all_bytes == 80 * per_position
    assert watch.largest_bytes == 50 * per_position


def test_a_worker_of_two_groups_shares_its_memory_between_them() -> None:
    rig = Rig(2)

    watch = look(rig, worker(rig, (0, 1), 40))

    assert watch.all_bytes == watch.largest_bytes == 40 * kv_bytes_per_position(rig.config)


def test_workers_that_do_not_say_bound_nothing() -> None:
    rig = Rig(2)

    silent = WorkerInfo("old", (0,), WorkerState.SERVING)
    assert look(rig, silent, worker(rig, (1,), 30)).all_bytes is None
    assert look(rig).all_bytes is None


def test_what_was_known_holds_while_a_group_has_no_worker() -> None:
    rig = Rig(2)
    peers = [worker(rig, (0,), 100), worker(rig, (1,), 30)]
    watch = CapacityWatch(lambda: peers, model_of(rig), every_s=1.0)
    watch.look(0.0)

    peers.pop()
    watch.look(0.5)
    watch.look(1.0)

    assert watch.all_bytes == 30 * kv_bytes_per_position(rig.config)


def test_shared_rows_take_room_in_every_worker_but_not_in_the_store() -> None:
    budget = KvBudget(100)
    budget.worker_bytes = 150
    budget.reserve("a", 20, shared_bytes=80)

    assert budget.reserved_bytes == 20
    assert budget.fits(50)
    assert not budget.fits(51)
    budget.release("a")
    assert budget.fits(100)


def test_one_alone_is_let_in_though_a_worker_left() -> None:
    budget = KvBudget(None)
    budget.worker_bytes = 10

    assert budget.fits(50)
    budget.reserve("a", 50)
    assert not budget.fits(1)


@pytest.fixture
def rig() -> Rig:
    return Rig(2, prefix_bytes=None)


def test_no_more_runs_at_once_than_the_workers_hold(rig: Rig) -> None:
    rig.add_workers()
    room = int(2.5 * NUM_POSITIONS)
    peers = [worker(rig, (0,), room), worker(rig, (1,), 100 * NUM_POSITIONS)]
    scheduler = rig.add_scheduler(peers=lambda: peers)
    rig.open_reply_queue("mine")
    names = [f"r{n}" for n in range(5)]

    for name in names:
        submit(rig, name)
    most = 0
    while scheduler.num_answered < len(names):
        rig.turn()
        most = max(most, scheduler.num_in_flight - scheduler.num_waiting)

    assert most == 2
    replies = rig.replies("mine")
    assert [reply.request_id for reply in replies] == names
    assert all(len(reply.token_ids) == 12 for reply in replies)


def test_what_no_worker_could_hold_is_refused_with_both_numbers(rig: Rig) -> None:
    rig.add_workers()
    peers = [worker(rig, (0,), 20), worker(rig, (1,), 1000)]
    scheduler = rig.add_scheduler(peers=lambda: peers)
    rig.open_reply_queue("mine")

    submit(rig, "big")
    rig.run_until(lambda: scheduler.num_answered == 1)

    (reply,) = rig.replies("mine")
    assert reply.finish_reason is FinishReason.ERROR
    per_position = kv_bytes_per_position(rig.config)
    assert str(NUM_POSITIONS * per_position) in reply.error
    assert str(20 * per_position) in reply.error
    assert "--memory" in reply.error
    assert reply.token_ids == ()
