"""Pages that sequences of one process share are the same arrays, within a budget."""

from __future__ import annotations

import numpy as np

from shared.model.kv_cache import PAGE_POSITIONS, SequenceCache
from shared.model.local_prefixes import LocalPrefixes

NUM_GROUPS = 2
DIGESTS = [bytes([n]) * 32 for n in range(8)]
OTHERS = [bytes([100 + n]) * 32 for n in range(8)]


def make_cache(group: int) -> SequenceCache:
    return SequenceCache(num_layers=1 + group, num_key_value_heads=1, head_dim=8)


PAGE_BYTES = sum(make_cache(group).page_bytes for group in range(NUM_GROUPS))


def compute(prefixes: LocalPrefixes, request_id: str, num_rows: int) -> list[SequenceCache]:
    """The caches of a request, with so many rows, as after the turns of two workers."""
    caches = []
    for group in range(NUM_GROUPS):
        cache = prefixes.open_cache(group, request_id, make_cache)
        have = cache.num_positions
        rows = np.full((num_rows - have) * cache.row_bytes // 2, 1 + group, "<u2").tobytes()
        cache.import_rows(have, rows)
        caches.append(cache)
    return caches


def test_sequences_that_begin_alike_hold_the_same_arrays() -> None:
    prefixes = LocalPrefixes(NUM_GROUPS, max_bytes=100 * PAGE_BYTES)
    assert prefixes.attach("a", DIGESTS) == 0
    first = compute(prefixes, "a", 40)
    assert prefixes.share("a", DIGESTS) == 2
    prefixes.release("a")

    assert prefixes.attach("b", DIGESTS[:5]) == 2
    second = compute(prefixes, "b", 50)

    for group in range(NUM_GROUPS):
        assert [a is b for a, b in zip(first[group].pages, second[group].pages, strict=False)] == [
            True,
            True,
            False,
        ]
        assert second[group].page_addresses[0] == first[group].pages[0].ctypes.data
        assert first[group].export_rows(0, 32) == second[group].export_rows(0, 32)
    assert prefixes.num_bytes() == 2 * PAGE_BYTES


def test_only_what_every_group_has_is_shared() -> None:
    prefixes = LocalPrefixes(NUM_GROUPS, max_bytes=100 * PAGE_BYTES)
    prefixes.attach("a", DIGESTS)
    cache = prefixes.open_cache(0, "a", make_cache)
    cache.import_rows(0, bytes(3 * PAGE_POSITIONS * cache.row_bytes))

    assert prefixes.share("a", DIGESTS) == 0
    cache = prefixes.open_cache(1, "a", make_cache)
    cache.import_rows(0, bytes(2 * PAGE_POSITIONS * cache.row_bytes))
    assert prefixes.share("a", DIGESTS) == 2


def test_the_last_used_stay_and_of_one_prompt_the_first_pages() -> None:
    prefixes = LocalPrefixes(NUM_GROUPS, max_bytes=5 * PAGE_BYTES)
    for request_id, digests in (("a", DIGESTS), ("b", OTHERS)):
        prefixes.attach(request_id, digests)
        compute(prefixes, request_id, 4 * PAGE_POSITIONS)
        prefixes.share(request_id, digests)
        prefixes.release(request_id)

    assert prefixes.num_bytes() == 5 * PAGE_BYTES
    assert prefixes.attach("c", OTHERS) == 4
    assert prefixes.attach("d", DIGESTS) == 1


def test_a_request_that_has_ended_leaves_no_cache() -> None:
    prefixes = LocalPrefixes(NUM_GROUPS, max_bytes=100 * PAGE_BYTES)
    prefixes.attach("a", DIGESTS)
    compute(prefixes, "a", 40)
    prefixes.release("a")

    compute(prefixes, "a", 40)  # by a late step

    assert prefixes.share("a", DIGESTS) == 0
    assert prefixes.num_bytes() == 0
