"""The KV caches of a worker make room before they grow."""

from __future__ import annotations

import pytest

from services.worker.sequences import SequencePool
from shared.model.kv_cache import PAGE_POSITIONS, SequenceCache
from tests.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig(1)


def new_cache(rig: Rig) -> SequenceCache:
    config = rig.config
    return SequenceCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)


def pool_of(rig: Rig, num_pages: int) -> SequencePool:
    return SequencePool(
        lambda _: new_cache(rig), rig.kv_pages, max_bytes=num_pages * new_cache(rig).page_bytes
    )


def fill(pool: SequencePool, name: str, num_pages: int, now_s: float) -> None:
    state = pool.get(0, name, now_s=now_s)
    state.cache.ensure_capacity(num_pages * PAGE_POSITIONS)
    state.cache.advance(num_pages * PAGE_POSITIONS)


def held(pool: SequencePool) -> list[str]:
    return [name for name in "abc" if pool.peek(0, name)]


def test_the_least_recently_used_go_before_a_sequence_grows(rig: Rig) -> None:
    pool = pool_of(rig, 6)
    for now_s, name in enumerate("abc"):
        fill(pool, name, 2, float(now_s))

    pool.make_room([(0, "c", 3 * PAGE_POSITIONS)])

    assert held(pool) == ["b", "c"]
    assert pool.num_bytes + new_cache(rig).page_bytes <= 6 * new_cache(rig).page_bytes


def test_nobody_goes_while_there_is_room(rig: Rig) -> None:
    pool = pool_of(rig, 7)
    for now_s, name in enumerate("abc"):
        fill(pool, name, 2, float(now_s))

    pool.make_room([(0, "c", 3 * PAGE_POSITIONS)])

    assert held(pool) == ["a", "b", "c"]


def test_rows_of_drafts_go_last(rig: Rig) -> None:
    pool = pool_of(rig, 4)
    for now_s, name in enumerate("ab"):
        fill(pool, name, 2, float(now_s))
    state = pool.peek(0, "a")
    assert state is not None
    state.draft = (1, 2)

    pool.make_room([(0, "c", PAGE_POSITIONS)])
    assert held(pool) == ["a"]
    pool.make_room([(0, "c", 3 * PAGE_POSITIONS)])
    assert held(pool) == []


def test_those_of_the_turn_itself_stay(rig: Rig) -> None:
    pool = pool_of(rig, 1)
    for name in "ab":
        fill(pool, name, 2, 0.0)

    pool.make_room([(0, name, 2 * PAGE_POSITIONS) for name in "ab"])

    assert held(pool) == ["a", "b"]
