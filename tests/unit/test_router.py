"""Who gets a step: the worker that has its rows, unless another is clearly better."""

from __future__ import annotations

import pytest

from shared.router import Peer, choose_worker, with_worker, worker_of
from shared.store.presence_types import WorkerInfo, WorkerState

A = Peer("a", (1,), turn_us=5_000)
B = Peer("b", (1,), turn_us=5_000)


def changed(peer: Peer, **changes: object) -> Peer:
    from dataclasses import replace

    return replace(peer, **changes)  # type: ignore[arg-type]


def test_without_peers_any_worker_may_take_it() -> None:
    assert choose_worker(1, "a", []) == ""


def test_a_worker_of_another_group_is_not_chosen() -> None:
    assert choose_worker(0, "a", [A, B]) == ""


def test_the_routed_worker_is_kept_though_another_is_idle() -> None:
    assert choose_worker(1, "b", [A, changed(B, num_pending=2)]) == "b"


@pytest.mark.parametrize("gone", [[], [changed(B, is_serving=False)], [changed(B, groups=(2,))]])
def test_a_routed_worker_that_is_gone_or_drains_is_replaced(gone: list[Peer]) -> None:
    assert choose_worker(1, "b", [A, *gone]) == "a"


def test_a_routed_worker_with_a_long_queue_is_left() -> None:
    assert choose_worker(1, "b", [A, changed(B, num_pending=30)]) == "a"


def test_a_routed_worker_that_is_much_slower_is_left() -> None:
    assert choose_worker(1, "b", [A, changed(B, turn_us=50_000)]) == "a"


def test_a_routed_worker_that_is_slow_is_kept_when_all_are() -> None:
    slow = changed(A, turn_us=50_000)

    assert choose_worker(1, "b", [slow, changed(B, turn_us=60_000)]) == "b"


def test_a_bound_step_stays_with_a_loaded_worker_but_not_with_one_that_is_gone() -> None:
    loaded = changed(B, num_pending=30)

    assert choose_worker(1, "b", [A, loaded], is_bound=True) == "b"
    assert choose_worker(1, "b", [A, changed(B, is_serving=False)], is_bound=True) == "a"


def test_first_contact_goes_to_the_least_loaded() -> None:
    assert choose_worker(1, "", [changed(A, num_active=3), changed(B, num_active=2)]) == "b"
    assert choose_worker(1, "", [changed(A, num_pending=3), B]) == "b"
    assert choose_worker(1, "", [changed(A, turn_us=50_000), changed(B, num_active=5)]) == "b"


def test_first_contacts_spread_before_the_next_heartbeat_tells_of_them() -> None:
    peers = {peer.worker_id: peer for peer in (A, B)}

    chosen = []
    for _ in range(6):
        worker_id = choose_worker(1, "", list(peers.values()))
        peers[worker_id] = peers[worker_id].assigned()
        chosen.append(worker_id)

    assert chosen.count("a") == chosen.count("b") == 3


@pytest.mark.parametrize("state", list(WorkerState))
def test_only_a_serving_worker_is_sent_to(state: WorkerState) -> None:
    peer = Peer.of(WorkerInfo("w", (0,), state))

    assert (choose_worker(0, "w", [peer]) == "w") == (state is WorkerState.SERVING)


def test_a_route_grows_to_the_group_that_is_set() -> None:
    assert with_worker((), 2, "w") == ("", "", "w")
    assert with_worker(("a", "b"), 0, "c") == ("c", "b")
    assert worker_of(("a",), 1) == ""
    assert worker_of(("a", "b"), 1) == "b"


def test_a_worker_that_came_to_a_stop_is_taken_only_if_nobody_else_is_there() -> None:
    assert choose_worker(1, "", [A, changed(B, num_pending=30)], shunned="a") == "b"
    assert choose_worker(1, "", [A], shunned="a") == "a"
