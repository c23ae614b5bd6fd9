"""Shared KV pages: moved from who computed them, listed for who uses them, and never zeros."""

from __future__ import annotations

import pytest

from shared.errors import KvMissing
from shared.store import keys
from shared.store.connection import Stores, connect
from shared.store.kv_pages import PAGE_ROWS, KvPages
from shared.store.prefix_pages import StoredPrefixes, page_digests
from shared.topology import Layout
from tests.contract.redis_server import RedisServer

LAYER = 24  # bytes of a row in one layer
LAYOUT = Layout("cut", "tiny@0123abcd", ((0, 1), (1, 3)))
SIZES = (LAYER, 2 * LAYER)
PAGE_BYTES = PAGE_ROWS * 3 * LAYER
TOKENS = list(range(100, 200))  # six full pages


def rows(start: int, stop: int, size: int) -> bytes:
    """Rows that tell their position and are never zero."""
    return b"".join((p + 1).to_bytes(4, "little") * (size // 4) for p in range(start, stop))


def write(pages: KvPages, request_id: str, start: int, stop: int) -> None:
    for group, size in enumerate(SIZES):
        pages.write(request_id, group, start, rows(start, stop, size))


def assert_rows(pages: KvPages, request_id: str, stop: int) -> None:
    assert pages.rows_by_group(request_id, stop) == [stop, stop]
    for group, size in enumerate(SIZES):
        assert pages.num_rows(request_id, group) == stop
        assert pages.read(request_id, group, 0, stop) == rows(0, stop, size)
        assert pages.read(request_id, group, 5, stop) == rows(5, stop, size)


def own_pages(stores: Stores, request_id: str) -> int:
    return len(stores.kv.run(("KEYS", f"{keys.PREFIX}{{{request_id}}}:kv:cut:[0-9]*")))


@pytest.fixture
def pages(stores: Stores) -> KvPages:
    return KvPages.of_layout(stores.kv, LAYOUT, LAYER)


@pytest.fixture
def prefixes(stores: Stores) -> StoredPrefixes:
    return StoredPrefixes(stores.kv, LAYOUT, LAYER, max_bytes=100 * PAGE_BYTES)


def test_the_digest_of_a_page_is_of_all_tokens_up_to_its_end() -> None:
    digests = page_digests(LAYOUT, TOKENS)
    changed = [*TOKENS[:20], 7, *TOKENS[21:]]
    other_cut = Layout("cut", LAYOUT.model_id, ((0, 2), (2, 3)))
    other_model = Layout("cut", "tiny@99999999", LAYOUT.bounds)

    assert len(set(digests)) == 6
    assert page_digests(LAYOUT, TOKENS[:40]) == digests[:2]
    assert page_digests(LAYOUT, TOKENS[:15]) == []
    assert page_digests(LAYOUT, changed)[:1] == digests[:1]
    assert not set(page_digests(LAYOUT, changed)[1:]) & set(digests)
    assert not set(page_digests(other_cut, TOKENS)) & set(digests)
    assert not set(page_digests(other_model, TOKENS)) & set(digests)


def test_pages_are_moved_and_both_read_them(
    pages: KvPages, prefixes: StoredPrefixes, stores: Stores
) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    write(pages, "a", 0, 100)

    assert prefixes.share("a", digests) == 6
    assert prefixes.share("a", digests) == 6  # again changes nothing
    assert prefixes.attach("b", digests[:4]) == 4

    assert own_pages(stores, "a") == 2  # the last one, which is not full, of each group
    assert own_pages(stores, "b") == 0
    assert_rows(pages, "a", 100)
    assert_rows(pages, "b", 64)
    assert prefixes.num_bytes() == 6 * PAGE_BYTES


def test_rows_follow_shared_ones_without_a_gap(
    pages: KvPages, prefixes: StoredPrefixes, stores: Stores
) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    write(pages, "a", 0, 100)
    prefixes.share("a", digests)
    prefixes.attach("b", digests[:2])

    with pytest.raises(KvMissing):
        pages.write("b", 0, 48, rows(48, 49, SIZES[0]))
    with pytest.raises(KvMissing):
        pages.write("b", 0, 33, rows(33, 34, SIZES[0]))
    write(pages, "b", 32, 40)
    write(pages, "b", 40, 41)
    write(pages, "b", 20, 60)  # as after a redelivery: what is shared already is left out
    write(pages, "b", 3, 20)

    assert_rows(pages, "b", 60)
    assert own_pages(stores, "b") == 2 * 2


def test_a_page_that_is_not_full_in_every_group_is_not_shared(
    pages: KvPages, prefixes: StoredPrefixes
) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    pages.write("a", 0, 0, rows(0, 64, SIZES[0]))
    pages.write("a", 1, 0, rows(0, 47, SIZES[1]))

    assert prefixes.share("a", digests) == 2
    assert prefixes.attach("b", digests) == 2
    pages.write("a", 1, 47, rows(47, 64, SIZES[1]))
    assert prefixes.share("a", digests) == 4

    assert_rows(pages, "a", 64)


def test_two_that_computed_the_same_keep_one(
    pages: KvPages, prefixes: StoredPrefixes, stores: Stores
) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    for request_id in "ab":
        write(pages, request_id, 0, 50)
        assert prefixes.share(request_id, digests) == 3

    assert prefixes.num_bytes() == 3 * PAGE_BYTES
    assert own_pages(stores, "a") == own_pages(stores, "b") == 2
    for request_id in "ab":
        assert_rows(pages, request_id, 50)


def test_what_is_deleted_with_a_request_is_its_own(
    pages: KvPages, prefixes: StoredPrefixes, stores: Stores
) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    write(pages, "a", 0, 50)
    prefixes.share("a", digests)
    prefixes.attach("b", digests[:3])
    write(pages, "b", 48, 70)

    pages.delete("a", 2, 100)
    pages.delete("b", 2, 100)

    assert stores.kv.run(("KEYS", f"{keys.PREFIX}{{*")) == []
    assert pages.rows_by_group("a", 100) == [0, 0]
    with pytest.raises(KvMissing):  # a late write of an ended request comes to nothing
        pages.write("b", 0, 64, rows(64, 65, SIZES[0]))
    assert prefixes.attach("c", digests) == 3


def test_a_page_that_was_evicted_is_missing_and_the_list_is_cut_to_what_is_there(
    pages: KvPages, prefixes: StoredPrefixes, stores: Stores
) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    write(pages, "a", 0, 100)
    prefixes.share("a", digests)
    prefixes.attach("b", digests[:5])
    write(pages, "b", 80, 90)
    stores.kv.run(("DEL", keys.prefix_page("cut", 1, digests[2])))

    with pytest.raises(KvMissing):
        pages.read("b", 1, 0, 80)
    assert pages.rows_by_group("b", 90) == [90, 32]
    pages.keep_shared("b", 32)
    write(pages, "b", 32, 90)

    assert_rows(pages, "b", 90)
    assert prefixes.attach("c", digests) == 2


@pytest.mark.parametrize(("position", "kept"), [(0, 0), (1, 1), (16, 1), (17, 2), (99, 5)])
def test_rows_before_a_position_stay_shared(
    pages: KvPages, prefixes: StoredPrefixes, stores: Stores, position: int, kept: int
) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    write(pages, "a", 0, 100)
    prefixes.share("a", digests)
    prefixes.attach("b", digests[:5])

    pages.keep_shared("b", position)

    assert pages.shared("b") == digests[:kept]
    if kept:
        assert stores.kv.run(("PTTL", keys.kv_shared("b", "cut"))) > 0


def test_attaching_again_lists_what_is_there_now(pages: KvPages, prefixes: StoredPrefixes) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    write(pages, "a", 0, 100)
    prefixes.share("a", digests)

    assert prefixes.attach("b", digests) == 6
    assert prefixes.attach("b", digests[:2]) == 2
    assert pages.shared("b") == digests[:2]
    assert prefixes.attach("b", page_digests(LAYOUT, TOKENS[50:])) == 0
    assert pages.shared("b") == []


def test_more_pages_than_one_call_takes(stores: Stores) -> None:
    layout = Layout("wide", "tiny@0123abcd", tuple((n, n + 1) for n in range(30)))
    pages = KvPages.of_layout(stores.kv, layout, 4)
    prefixes = StoredPrefixes(stores.kv, layout, 4, max_bytes=1 << 30)
    tokens = list(range(16 * 70))
    for group in range(30):
        pages.write("a", group, 0, rows(0, len(tokens), 4))

    assert prefixes.share("a", page_digests(layout, tokens)) == 70
    assert prefixes.attach("b", page_digests(layout, tokens)) == 70

    assert pages.rows_by_group("b", 2_000) == [16 * 70] * 30


def test_the_least_recently_used_go_and_of_one_prompt_the_last_pages(
    pages: KvPages, stores: Stores
) -> None:
    small = StoredPrefixes(stores.kv, LAYOUT, LAYER, max_bytes=5 * PAGE_BYTES)
    other = list(range(500, 600))
    write(pages, "a", 0, 48)
    assert small.share("a", page_digests(LAYOUT, TOKENS)) == 3
    write(pages, "b", 0, 32)
    small.share("b", page_digests(LAYOUT, other))
    assert small.attach("c", page_digests(LAYOUT, TOKENS)) == 3  # used again

    write(pages, "d", 0, 32)
    small.share("d", page_digests(LAYOUT, list(range(800, 900))))

    assert small.num_bytes() == 5 * PAGE_BYTES
    assert small.attach("e", page_digests(LAYOUT, other)) == 0
    assert small.attach("e", page_digests(LAYOUT, TOKENS)) == 3
    assert len(stores.kv.run(("KEYS", f"{keys.PREFIX}prefix:*"))) == 5 * 2


def test_use_prolongs_life(pages: KvPages, stores: Stores) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    short = StoredPrefixes(stores.kv, LAYOUT, LAYER, max_bytes=1 << 20, ttl_s=100)
    long = StoredPrefixes(stores.kv, LAYOUT, LAYER, max_bytes=1 << 20, ttl_s=1_000)
    write(pages, "a", 0, 40)
    short.share("a", digests)
    key = keys.prefix_page("cut", 1, digests[1])
    assert stores.kv.run(("PTTL", key)) <= 100_000

    long.attach("b", digests)

    assert stores.kv.run(("PTTL", key)) > 100_000


def test_a_garbled_list_is_rows_that_are_missing(
    pages: KvPages, prefixes: StoredPrefixes, stores: Stores
) -> None:
    digests = page_digests(LAYOUT, TOKENS)
    write(pages, "a", 0, 40)
    prefixes.share("a", digests)
    prefixes.attach("b", digests)
    listed = keys.kv_shared("b", "cut")
    stores.kv.run(("DEL", listed))
    stores.kv.run(("HSET", listed, "a", "b"))

    assert pages.rows_by_group("b", 40) == [0, 0]
    with pytest.raises(KvMissing):
        pages.read("b", 0, 0, 32)
    write(pages, "b", 0, 40)

    assert_rows(pages, "b", 40)


@pytest.mark.servers
def test_shared_pages_give_way_on_a_server_that_is_nearly_full(shared_redis: RedisServer) -> None:
    stores = connect(shared_redis.url)
    stores.kv.run(("FLUSHALL",))
    pages = KvPages.of_layout(stores.kv, LAYOUT, LAYER)
    prefixes = StoredPrefixes(stores.kv, LAYOUT, LAYER, max_bytes=1 << 30)
    write(pages, "a", 0, 100)
    prefixes.share("a", page_digests(LAYOUT, TOKENS))
    prefixes.relieve()
    assert prefixes.num_bytes() > 0

    stores.kv.run(("CONFIG", "SET", "maxmemory", 1 << 16))
    try:
        prefixes.relieve()
    finally:
        stores.kv.run(("CONFIG", "SET", "maxmemory", 0))

    assert prefixes.num_bytes() == 0
    stores.close()
