"""A worker takes what nobody serves and leaves what others serve, once it has been so for long."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from services.worker.placement import (
    ADOPT_AFTER_S,
    LOAD_AGAIN_AFTER_S,
    Placement,
    check_memory,
)
from shared.config import parse_size
from shared.errors import ConfigError, ShardError
from shared.store.connection import connect
from shared.store.presence import Presence
from shared.store.presence_types import WorkerInfo, WorkerState
from shared.topology import even_layout

LAYOUT = even_layout("tiny@0123", 12, 2)
SIZES = (100, 100)


class Groups:
    """What a worker serves."""

    def __init__(self, *groups: int) -> None:
        self.groups: tuple[int, ...] = groups

    def serve_group(self, group: int, _: Any) -> None:
        self.groups = tuple(sorted((*self.groups, group)))

    def drop_group(self, group: int) -> None:
        self.groups = tuple(g for g in self.groups if g != group)


def load_any(group: int) -> Any:
    return group


def placed(
    memory_bytes: int, *groups: int, load: Callable[[int], Any] = load_any
) -> tuple[Presence, Placement, Groups]:
    presence = Presence(connect("memory://").meta, ttl_ms=60_000)
    info = WorkerInfo("me", state=WorkerState.SERVING, memory_bytes=memory_bytes)
    placement = Placement(
        presence,
        LAYOUT,
        SIZES,
        claimant=lambda: info,
        load=load,
    )
    placement.claim(groups)
    return presence, placement, Groups(*groups)


def other(presence: Presence, name: str, group: int, state: WorkerState) -> None:
    presence.claim(LAYOUT, WorkerInfo(name, state=state), SIZES, [group])


def balance_for(placement: Placement, worker: Groups, seconds: float) -> None:
    for second in range(int(seconds) + 1):
        placement.balance(worker, float(second))


@pytest.mark.parametrize(
    ("memory", "wanted", "what"),
    [
        ("128MiB", (1,), "group 1"),
        ("30MiB", (), "the smallest group (0)"),
        ("200MiB", (0, 1), "groups 0, 1"),
    ],
)
def test_too_little_memory_is_told_in_the_users_unit_with_what_is_enough(
    memory: str, wanted: tuple[int, ...], what: str
) -> None:
    sizes = (50_000_000, 80_000_000)
    memory_bytes = parse_size(memory, field="--memory")

    with pytest.raises(ConfigError) as raised:
        check_memory(memory_bytes, LAYOUT, sizes, wanted)

    assert f"--memory is {memory}, and {what} of layout even2 needs " in str(raised.value)
    enough = re.search(r"cellpipe worker.* --memory (\w+)", raised.value.remedy or "")
    assert enough is not None
    assert ("--groups" in raised.value.remedy) == (memory != "30MiB")  # no cut is that small
    check_memory(parse_size(enough[1], field="--memory"), LAYOUT, sizes, wanted)


def test_what_nobody_serves_is_adopted_after_a_while() -> None:
    presence, placement, worker = placed(250, 0)

    balance_for(placement, worker, ADOPT_AFTER_S - 1)
    assert worker.groups == (0,)
    balance_for(placement, worker, ADOPT_AFTER_S)

    assert worker.groups == (0, 1)
    assert presence.coverage(LAYOUT) == [1, 1]


def test_what_another_serves_too_is_given_back() -> None:
    presence, placement, worker = placed(250, 0, 1)
    other(presence, "other", 1, WorkerState.SERVING)

    balance_for(placement, worker, ADOPT_AFTER_S)

    assert worker.groups == (0,)
    assert presence.coverage(LAYOUT) == [1, 1]


def test_what_another_still_loads_is_kept() -> None:
    presence, placement, worker = placed(250, 0, 1)
    other(presence, "other", 1, WorkerState.LOADING)

    balance_for(placement, worker, 3 * ADOPT_AFTER_S)

    assert worker.groups == (0, 1)


def test_a_worker_without_room_moves_when_others_have_its_group() -> None:
    presence, placement, worker = placed(150, 0)
    other(presence, "other", 0, WorkerState.SERVING)

    balance_for(placement, worker, ADOPT_AFTER_S)

    assert worker.groups == (1,)
    assert presence.coverage(LAYOUT) == [1, 1]


def test_a_worker_without_room_stays_when_it_is_the_only_one() -> None:
    presence, placement, worker = placed(150, 0)

    balance_for(placement, worker, 3 * ADOPT_AFTER_S)

    assert worker.groups == (0,)
    assert presence.coverage(LAYOUT) == [1, 0]


def test_what_cannot_be_loaded_is_left_to_others_and_ends_no_worker() -> None:
    damaged = {1}
    num_loads = 0

    def load(group: int) -> Any:
        nonlocal num_loads
        num_loads += 1
        if group in damaged:
            raise ShardError("shard layer.6 is missing")

    presence, placement, worker = placed(250, 0, load=load)

    balance_for(placement, worker, LOAD_AGAIN_AFTER_S)
    assert (worker.groups, num_loads) == ((0,), 1)
    assert presence.coverage(LAYOUT) == [1, 0]  # whoever asks hears which group is not served

    damaged.clear()
    placement.balance(worker, LOAD_AGAIN_AFTER_S + ADOPT_AFTER_S)
    assert worker.groups == (0, 1)
    assert presence.coverage(LAYOUT) == [1, 1]
