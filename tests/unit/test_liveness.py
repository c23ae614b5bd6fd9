"""The group that a newcomer takes, in values and in the store's script."""

from __future__ import annotations

import random

import pytest

from shared.liveness import least_covered
from shared.store.connection import connect
from shared.store.presence import Presence
from shared.store.presence_types import WorkerInfo
from shared.topology import even_layout

NUM_GROUPS = 4


def test_newcomers_take_the_least_covered_group_that_they_have_room_for() -> None:
    assert least_covered([2, 1, 1]) == 1
    assert least_covered([2, 1, 1], [True, False, True]) == 2
    assert least_covered([0], [False]) is None


@pytest.mark.parametrize("seed", range(10))
def test_the_stores_script_gives_the_same_group(seed: int) -> None:
    rng = random.Random(seed)
    layout = even_layout("tiny@0123", 12, NUM_GROUPS)
    presence = Presence(connect("memory://").meta, ttl_ms=60_000)
    sizes = [rng.choice((100, 200)) for _ in range(NUM_GROUPS)]

    for number in range(12):
        memory = rng.choice((0, 100, 250)) or 0
        fits = [memory == 0 or size <= memory for size in sizes]
        expected = least_covered(presence.coverage(layout), fits)
        if expected is None:
            continue
        info = WorkerInfo(f"worker-{number}", memory_bytes=memory)

        assert presence.claim(layout, info, sizes) == (expected,)
