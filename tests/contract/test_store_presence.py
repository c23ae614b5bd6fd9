"""Presence: live workers spread over the groups, ghosts do not count."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from shared.errors import ConfigError
from shared.store import keys
from shared.store.connection import Stores
from shared.store.presence import Presence
from shared.store.presence_types import SchedulerInfo, WorkerInfo, WorkerState
from shared.topology import even_layout

LAYOUT = even_layout("tiny@0123", 12, 3)
SIZES = (100, 80, 120)


@pytest.fixture
def presence(stores: Stores) -> Presence:
    return Presence(stores.meta, ttl_ms=60_000)


def kill(stores: Stores, worker_id: str) -> None:
    """What the end of its time to live does to a worker that hangs or dies."""
    stores.meta.run(("DEL", keys.worker("tiny@0123", LAYOUT.layout_id, worker_id)))


def test_workers_take_the_least_covered_group_lowest_first(presence: Presence) -> None:
    claims = [presence.claim(LAYOUT, WorkerInfo(f"w{i}"), SIZES) for i in range(5)]

    assert claims == [(0,), (1,), (2,), (0,), (1,)]
    assert presence.coverage(LAYOUT) == [2, 2, 1]


def test_twenty_workers_that_start_together_spread_evenly(presence: Presence) -> None:
    with ThreadPoolExecutor(20) as pool:
        claims = list(
            pool.map(lambda i: presence.claim(LAYOUT, WorkerInfo(f"w{i}"), SIZES), range(20))
        )

    assert sorted(Counter(claims).values()) == [6, 7, 7]
    assert sorted(presence.coverage(LAYOUT)) == [6, 7, 7]


def test_a_claim_that_is_repeated_keeps_its_group(presence: Presence) -> None:
    first = presence.claim(LAYOUT, WorkerInfo("w0"), SIZES)

    assert presence.claim(LAYOUT, WorkerInfo("w0"), SIZES) == first == (0,)
    assert presence.coverage(LAYOUT) == [1, 0, 0]


def test_ghosts_do_not_count_and_are_swept_out(presence: Presence, stores: Stores) -> None:
    for i in range(3):
        presence.claim(LAYOUT, WorkerInfo(f"w{i}"), SIZES)
    kill(stores, "w1")

    assert presence.coverage(LAYOUT) == [1, 0, 1]
    assert presence.claim(LAYOUT, WorkerInfo("w3"), SIZES) == (1,)
    held = stores.meta.run(("HKEYS", keys.claims("tiny@0123", LAYOUT.layout_id)))
    assert sorted(held) == [b"w0", b"w2", b"w3"]


def test_a_wanted_group_is_given_however_covered(presence: Presence) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES, wanted=(2,))

    assert presence.claim(LAYOUT, WorkerInfo("w1"), SIZES, wanted=(2, 0)) == (0, 2)
    assert presence.coverage(LAYOUT) == [1, 0, 2]


def test_a_group_that_does_not_fit_is_not_taken(presence: Presence) -> None:
    info = WorkerInfo("w0", memory_bytes=90)

    assert presence.claim(LAYOUT, info, SIZES) == (1,)


@pytest.mark.parametrize(
    ("memory_bytes", "wanted", "words"),
    [
        (79, (), "--memory is 79 bytes and the smallest group of layout even3 takes 80"),
        (110, (2,), r"groups \[2\] of layout even3 takes 120"),
        (0, (3,), r"--group must be in 0\.\.2 for layout even3, got 3"),
        (0, (-1,), r"--group must be in 0\.\.2"),
    ],
)
def test_what_cannot_be_served_is_a_config_error(
    presence: Presence, memory_bytes: int, wanted: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        presence.claim(LAYOUT, WorkerInfo("w0", memory_bytes=memory_bytes), SIZES, wanted)

    assert presence.workers(LAYOUT) == []


def test_spare_memory_adopts_groups_that_nobody_covers(presence: Presence) -> None:
    info = WorkerInfo("w0", memory_bytes=230)
    presence.claim(LAYOUT, info, SIZES)

    assert presence.adopt_uncovered(LAYOUT, info, SIZES) == (0, 1)
    assert presence.adopt_uncovered(LAYOUT, info, SIZES) == (0, 1)
    assert presence.coverage(LAYOUT) == [1, 1, 0]


def test_a_budget_that_is_used_up_adopts_nothing(presence: Presence) -> None:
    info = WorkerInfo("w0", memory_bytes=100)
    presence.claim(LAYOUT, info, SIZES)

    assert presence.adopt_uncovered(LAYOUT, info, SIZES) == (0,)


def test_no_budget_adopts_all_and_covered_groups_are_left_alone(presence: Presence) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES)
    presence.claim(LAYOUT, WorkerInfo("w1"), SIZES)

    assert presence.adopt_uncovered(LAYOUT, WorkerInfo("w1"), SIZES) == (1, 2)
    assert presence.adopt_uncovered(LAYOUT, WorkerInfo("w0"), SIZES) == (0,)


def test_a_group_is_adopted_by_one_of_many(presence: Presence) -> None:
    infos = [WorkerInfo(f"w{i}") for i in range(8)]
    for info in infos:
        presence.claim(LAYOUT, info, SIZES, wanted=(0,))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda info: presence.adopt_uncovered(LAYOUT, info, SIZES), infos))

    assert presence.coverage(LAYOUT) == [8, 1, 1]


def test_a_worker_that_expired_is_told_and_claims_again(presence: Presence, stores: Stores) -> None:
    info = WorkerInfo("w0")
    presence.claim(LAYOUT, info, SIZES, wanted=(1,))
    kill(stores, "w0")

    assert presence.heartbeat(LAYOUT, info) is False
    assert presence.adopt_uncovered(LAYOUT, info, SIZES) == ()
    assert presence.workers(LAYOUT) == []
    assert presence.claim(LAYOUT, info, SIZES, wanted=(1,)) == (1,)
    assert presence.heartbeat(LAYOUT, info) is True


def test_a_presence_ends_unless_it_is_refreshed(presence: Presence, stores: Stores) -> None:
    key = keys.worker("tiny@0123", LAYOUT.layout_id, "w0")
    Presence(stores.meta, ttl_ms=500).claim(LAYOUT, WorkerInfo("w0"), SIZES)
    before = stores.meta.run(("PTTL", key))

    presence.heartbeat(LAYOUT, WorkerInfo("w0"))

    assert 0 < before <= 500
    assert 500 < stores.meta.run(("PTTL", key)) <= 60_000


def test_a_heartbeat_carries_the_figures(presence: Presence) -> None:
    info = WorkerInfo(
        "w0", (), WorkerState.SERVING, "box-é", 4711, 80, 90, 50, 256, 12, 1_790_000_000_000, 1
    )
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES)

    presence.heartbeat(LAYOUT, info)

    assert presence.workers(LAYOUT) == [replace(info, groups=(0,))]


def test_a_worker_that_leaves_is_gone(presence: Presence) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES)
    presence.claim(LAYOUT, WorkerInfo("w1"), SIZES)

    presence.release("w0", LAYOUT)

    assert [worker.worker_id for worker in presence.workers(LAYOUT)] == ["w1"]
    assert presence.coverage(LAYOUT) == [0, 1, 0]


def test_layouts_have_presence_of_their_own(presence: Presence) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES)

    assert presence.coverage(even_layout("tiny@0123", 12, 2)) == [0, 0]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"worker_id": 1}', '{"worker_id": "w0", "pid": true}',
             '{"worker_id": "w0", "state": "asleep"}', '{"worker_id": "w0", "groups": ["x"]}']
)  # fmt: skip
def test_a_garbled_presence_hides_one_worker_until_its_next_heartbeat(
    presence: Presence, stores: Stores, text: str
) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES)
    presence.claim(LAYOUT, WorkerInfo("w1"), SIZES)
    stores.meta.run(("SET", keys.worker("tiny@0123", LAYOUT.layout_id, "w0"), text, "KEEPTTL"))

    garbled = presence.coverage(LAYOUT)
    presence.heartbeat(LAYOUT, WorkerInfo("w0"))

    assert garbled == [0, 1, 0]
    assert presence.coverage(LAYOUT) == [1, 1, 0]


@pytest.mark.parametrize("claim", ["x", "0,x", "77", "0,3", "-1", "1.5", b"\xff"])
def test_a_garbled_claim_counts_as_none_and_is_claimed_again(
    presence: Presence, stores: Stores, claim: str | bytes
) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES)
    key = keys.claims(LAYOUT.model_id, LAYOUT.layout_id)
    stores.meta.run(("HSET", key, "w0", claim))

    garbled = presence.workers(LAYOUT)
    adopted = presence.adopt_uncovered(LAYOUT, WorkerInfo("w0"), SIZES)
    is_fresh = presence.heartbeat(LAYOUT, WorkerInfo("w0"))
    claimed = presence.claim(LAYOUT, WorkerInfo("w0"), SIZES, wanted=(0,))

    assert (garbled, adopted, is_fresh) == ([], (), False)
    assert claimed == (0,)
    assert presence.coverage(LAYOUT) == [1, 0, 0]


@pytest.mark.parametrize("loss", [("DEL",), ("SET", "garbage"), ("RPUSH", "garbage")])
def test_lost_claims_are_claimed_again(
    presence: Presence, stores: Stores, loss: tuple[str, ...]
) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES)
    key = keys.claims(LAYOUT.model_id, LAYOUT.layout_id)
    stores.meta.run(("DEL", key))
    stores.meta.run((loss[0], key, *loss[1:]))

    lost = presence.coverage(LAYOUT)
    is_fresh = presence.heartbeat(LAYOUT, WorkerInfo("w0"))
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES, wanted=(1,))

    assert (lost, is_fresh) == ([0, 0, 0], False)
    assert presence.coverage(LAYOUT) == [0, 1, 0]


def test_garbled_schedulers_are_seen_again_with_their_next_heartbeat(
    presence: Presence, stores: Stores
) -> None:
    presence.scheduler_heartbeat(SchedulerInfo("s0"))
    stores.meta.run(("SET", keys.SCHEDULERS, "garbage"))
    stores.meta.run(("SET", keys.scheduler("s0"), "{", "KEEPTTL"))

    garbled = presence.schedulers()
    presence.scheduler_heartbeat(SchedulerInfo("s0"))

    assert garbled == []
    assert presence.schedulers() == [SchedulerInfo("s0")]


def test_a_presence_of_a_newer_version_is_read() -> None:
    got = WorkerInfo.from_json('{"worker_id": "w0", "temperature_c": 71.5, "groups": [1, 2]}')

    assert got == WorkerInfo("w0", (1, 2))


def test_schedulers_are_seen_while_they_live(presence: Presence, stores: Stores) -> None:
    info = SchedulerInfo("s1", "box", 12, num_requests=3)
    presence.scheduler_heartbeat(SchedulerInfo("s0"))
    presence.scheduler_heartbeat(SchedulerInfo("s1"))
    presence.scheduler_heartbeat(info)
    stores.meta.run(("DEL", keys.scheduler("s0")))

    assert presence.schedulers() == [info]
    assert stores.meta.run(("SMEMBERS", keys.SCHEDULERS)) == [b"s1"]
    presence.scheduler_release("s1")
    assert presence.schedulers() == []


def test_a_worker_whose_groups_others_cover_moves_to_one_that_nobody_covers(
    presence: Presence,
) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES, [0])
    presence.claim(LAYOUT, WorkerInfo("w1"), SIZES, [0])
    presence.claim(LAYOUT, WorkerInfo("w2"), SIZES, [2])

    assert presence.move(LAYOUT, WorkerInfo("w2"), SIZES) == (2,)  # nobody else has it
    assert presence.move(LAYOUT, WorkerInfo("w1"), SIZES) == (1,)
    assert presence.move(LAYOUT, WorkerInfo("w0"), SIZES) == (0,)  # the last one there
    assert presence.coverage(LAYOUT) == [1, 1, 1]


def test_a_worker_moves_only_where_it_fits(presence: Presence) -> None:
    tight = WorkerInfo("w0", memory_bytes=SIZES[2] - 1)
    presence.claim(LAYOUT, tight, SIZES, [0])
    presence.claim(LAYOUT, WorkerInfo("w1"), SIZES, [0])
    presence.claim(LAYOUT, WorkerInfo("w2"), SIZES, [1])

    assert presence.move(LAYOUT, tight, SIZES) == (0,)
    assert presence.move(LAYOUT, WorkerInfo("w1"), SIZES) == (2,)


def test_a_group_that_others_cover_is_given_back_and_one_is_kept(presence: Presence) -> None:
    presence.claim(LAYOUT, WorkerInfo("w0"), SIZES, [0])
    assert presence.adopt_uncovered(LAYOUT, WorkerInfo("w0"), SIZES) == (0, 1, 2)
    presence.claim(LAYOUT, WorkerInfo("w1"), SIZES, [2])

    assert presence.give_back(LAYOUT, WorkerInfo("w0"), SIZES, [1, 2]) == (0, 1)
    presence.claim(LAYOUT, WorkerInfo("w2"), SIZES, [0, 1])
    assert len(presence.give_back(LAYOUT, WorkerInfo("w0"), SIZES, [0, 1])) == 1
    assert min(presence.coverage(LAYOUT)) == 1


def test_who_has_expired_neither_moves_nor_gives_back(presence: Presence) -> None:
    assert presence.move(LAYOUT, WorkerInfo("w0"), SIZES) == ()
    assert presence.give_back(LAYOUT, WorkerInfo("w0"), SIZES, [0]) == ()


def test_a_worker_hears_that_it_is_to_drain_and_no_other_does(presence: Presence) -> None:
    presence.request_drain("w0", LAYOUT)

    assert presence.is_drain_requested("w0", LAYOUT)
    assert not presence.is_drain_requested("w1", LAYOUT)
