"""Who has stopped telling of itself, and that nobody sends it work while others are there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.worker.sender import Sender
from services.worker.stages import Stages
from shared.broker.memory import MemoryBroker
from shared.broker.memory_hub import MemoryHub
from shared.router import Peer, choose_worker
from shared.silence import SILENT_AFTER_S, Silence
from shared.store.presence_types import WorkerInfo, WorkerState
from shared.topology import even_layout, group_queue, inbox_owner, inbox_queue

LAYOUT = even_layout("m@1", 4, 2)
A = WorkerInfo("a", (0,), WorkerState.SERVING, turn_us=5_000, told_unix_ms=1)
B = WorkerInfo("b", (0,), WorkerState.SERVING, turn_us=5_000, told_unix_ms=1)


def told(info: WorkerInfo, times: int) -> WorkerInfo:
    return replace(info, told_unix_ms=info.told_unix_ms + times)


def test_one_that_tells_nothing_new_becomes_silent() -> None:
    silence = Silence()
    silence.note([A, B], now_s=10.0)
    silence.note([A, told(B, 1)], now_s=10.0 + SILENT_AFTER_S)

    assert silence.is_silent("a", now_s=10.0 + SILENT_AFTER_S)
    assert not silence.is_silent("b", now_s=10.0 + SILENT_AFTER_S)


def test_a_clock_that_was_set_back_is_a_sign_of_life() -> None:
    silence = Silence()
    silence.note([told(A, 1_000)], now_s=10.0)
    silence.note([A], now_s=15.0)

    assert not silence.is_silent("a", now_s=15.0)


def test_a_doubted_one_is_silent_until_it_tells_anew() -> None:
    silence = Silence()
    silence.note([A], now_s=10.0)
    silence.doubt("a")
    silence.doubt("unknown")

    assert silence.is_silent("a", now_s=10.0)
    silence.note([A], now_s=10.5)
    assert silence.is_silent("a", now_s=10.5)
    silence.note([told(A, 1)], now_s=11.0)
    assert not silence.is_silent("a", now_s=11.0)
    assert not silence.is_silent("unknown", now_s=11.0)


def test_a_silent_worker_is_taken_only_if_nobody_else_is_there() -> None:
    silent, idle = Peer("a", (1,), is_silent=True), Peer("b", (1,), num_pending=20)

    assert choose_worker(1, "a", [silent, idle]) == "b"
    assert choose_worker(1, "a", [silent]) == "a"
    assert choose_worker(1, "a", [silent, idle], is_bound=True) == "a"  # its rows are nowhere else


@pytest.mark.parametrize("worker_id", ["node-7", "pc.example.org-12-ab.g9"])
def test_an_inbox_names_its_worker(worker_id: str) -> None:
    assert inbox_owner(inbox_queue(worker_id, 12)) == worker_id


def test_other_queues_are_nobodys_inbox() -> None:
    assert inbox_owner(group_queue("m", "l", 0)) == ""
    assert inbox_owner("") == ""


def test_a_sender_leaves_a_worker_that_left_a_step_lying() -> None:
    now_s, infos = 100.0, [A, B]
    sender = Sender(
        MemoryBroker(MemoryHub()),
        LAYOUT,
        read_peers=lambda: infos,
        clock=lambda: now_s,
        stages=Stages(),
    )

    assert sender.choose(0, "a") == "a"
    sender.doubt("a")
    assert sender.choose(0, "a") == "b"
    infos = [told(A, 1), told(B, 1)]
    now_s += 1.0
    assert sender.choose(0, "a") == "a"


def test_a_sender_leaves_a_worker_whose_heartbeat_stands_still() -> None:
    now_s = 100.0
    sender = Sender(
        MemoryBroker(MemoryHub()),
        LAYOUT,
        read_peers=lambda: [A, replace(B, told_unix_ms=int(now_s * 1e3))],
        clock=lambda: now_s,
        stages=Stages(),
    )
    for _ in range(5):
        sender.choose(0, "a")
        now_s += 0.5

    assert sender.choose(0, "a") == "b"
