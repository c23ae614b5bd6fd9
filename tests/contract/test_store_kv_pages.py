"""KV pages: what is read is what was written, and never zeros."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, KvMissing, StoreDamaged
from shared.store import keys
from shared.store.connection import Stores, connect
from shared.store.kv_pages import KvPages, KvRows

ROW = 24


def rows(start: int, stop: int, size: int = ROW) -> bytes:
    """Rows that tell their position and are never zero."""
    return b"".join(
        (position + 1).to_bytes(4, "little") * (size // 4) for position in range(start, stop)
    )


@pytest.fixture
def pages(stores: Stores) -> KvPages:
    return KvPages(stores.kv, "even2", [ROW, 2 * ROW])


def test_rows_are_read_as_they_were_written(pages: KvPages) -> None:
    pages.write("r", 0, 0, rows(0, 40))
    pages.write("r", 0, 40, rows(40, 41))

    assert pages.read("r", 0, 0, 41) == rows(0, 41)
    assert pages.read("r", 0, 15, 33) == rows(15, 33)
    assert pages.read("r", 0, 16, 32) == rows(16, 32)
    assert pages.read("r", 0, 5, 5) == b""


def test_groups_have_rows_of_their_own(pages: KvPages) -> None:
    pages.write("r", 0, 0, rows(0, 3))
    pages.write("r", 1, 0, memoryview(rows(0, 20, 2 * ROW)))

    assert pages.rows_by_group("r", 64) == [3, 20]
    assert pages.rows_by_group("r", 10) == [3, 10]
    assert pages.read("r", 1, 0, 20) == rows(0, 20, 2 * ROW)


@pytest.mark.parametrize(("present", "position"), [(0, 1), (5, 6), (5, 16), (16, 17), (16, 32)])
def test_a_write_that_would_leave_a_gap_is_refused(
    pages: KvPages, present: int, position: int
) -> None:
    if present:
        pages.write("r", 0, 0, rows(0, present))

    with pytest.raises(KvMissing, match=f"group 0 has no rows right before position {position}"):
        pages.write("r", 0, position, rows(position, position + 1))

    assert pages.num_rows("r", 0) == present


def test_writing_rows_again_changes_nothing(pages: KvPages) -> None:
    pages.write("r", 0, 0, rows(0, 35))

    pages.write("r", 0, 0, rows(0, 20))
    pages.write("r", 0, 34, rows(34, 35))

    assert pages.num_rows("r", 0) == 35
    assert pages.read("r", 0, 0, 35) == rows(0, 35)


def test_a_batch_tells_of_each_request_on_its_own(pages: KvPages) -> None:
    problems = pages.write_all(
        [
            KvRows("a", 0, 0, rows(0, 1)),
            KvRows("b", 0, 3, rows(3, 4)),
            KvRows("c", 0, 0, rows(0, 17)),
        ]
    )

    assert [problem is None for problem in problems] == [True, False, True]
    assert "request b" in str(problems[1])
    assert pages.num_rows("c", 0) == 17


def test_a_read_beyond_what_is_there_is_an_error_naming_it(pages: KvPages) -> None:
    pages.write("r", 0, 0, rows(0, 20))

    with pytest.raises(KvMissing, match=r"request r: group 0 holds 4 .* positions 16\.\.24"):
        pages.read("r", 0, 16, 25)


def test_a_short_page_is_an_error_not_zeros(pages: KvPages, stores: Stores) -> None:
    pages.write("r", 0, 0, rows(0, 40))
    stores.kv.run(("SET", keys.kv_page("r", "even2", 0, 1), rows(16, 20)))

    with pytest.raises(KvMissing):
        pages.read("r", 0, 0, 40)

    assert pages.num_rows("r", 0) == 20
    assert pages.rows_by_group("r", 40)[0] == 20


def test_a_torn_row_does_not_count(pages: KvPages, stores: Stores) -> None:
    stores.kv.run(("SET", keys.kv_page("r", "even2", 0, 0), rows(0, 2) + b"x"))

    assert pages.num_rows("r", 0) == 2


def test_many_pages_are_counted(pages: KvPages) -> None:
    pages.write("r", 0, 0, rows(0, 16 * 64 + 5))

    assert pages.num_rows("r", 0) == 16 * 64 + 5


def test_deleted_rows_are_gone(pages: KvPages) -> None:
    pages.write("r", 0, 0, rows(0, 40))
    pages.write("r", 1, 0, rows(0, 1, 2 * ROW))

    pages.delete("r", 2, 40)

    assert pages.rows_by_group("r", 40) == [0, 0]
    with pytest.raises(KvMissing):
        pages.read("r", 0, 0, 1)


def test_pages_live_on_while_their_request_goes_on(stores: Stores) -> None:
    short, long = (KvPages(stores.kv, "even1", [ROW], ttl_s=ttl) for ttl in (100, 1000))
    short.write("r", 0, 0, rows(0, 256))

    long.write("r", 0, 256, rows(256, 257))

    ttls = [stores.kv.run(("PTTL", keys.kv_page("r", "even1", 0, page))) for page in range(17)]
    assert all(ttl > 100_000 for ttl in ttls)


def test_half_a_row_is_our_mistake(pages: KvPages) -> None:
    with pytest.raises(ValueError, match="multiple of 24 bytes, got 25"):
        pages.write("r", 0, 0, bytes(25))


def test_a_page_over_eight_mib_is_refused_by_name(stores: Stores) -> None:
    with pytest.raises(ConfigError, match="group 1 of layout even2 has KV rows of 1048576 bytes"):
        KvPages(stores.kv, "even2", [1024, 1 << 20])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 70), st.integers(1, 40)), max_size=8))
def test_rows_stay_contiguous_whatever_is_written(writes: list[tuple[int, int]]) -> None:
    stores = connect("memory://")
    pages = KvPages(stores.kv, "even1", [ROW])
    present = 0

    for position, count in writes:
        problem = pages.write_all([KvRows("r", 0, position, rows(position, position + count))])[0]
        assert (problem is None) == (position <= present)
        if problem is None:
            present = max(present, position + count)

    assert pages.num_rows("r", 0) == present
    assert pages.read("r", 0, 0, present) == rows(0, present)
    stores.close()


@pytest.mark.parametrize("page", [0, 1, 2])
def test_a_page_of_another_type_holds_no_rows_and_can_be_written_again(
    pages: KvPages, stores: Stores, page: int
) -> None:
    pages.write("r", 0, 0, rows(0, 40))
    key = keys.kv_page("r", "even2", 0, page)
    stores.kv.run(("DEL", key))
    stores.kv.run(("HSET", key, "a", "b"))

    with pytest.raises(StoreDamaged):
        pages.read("r", 0, 0, 40)
    if page:  # the rows right before position 40 are there, or not
        assert isinstance(
            pages.write_all([KvRows("r", 0, 16 * page + 4, rows(0, 1))])[0], KvMissing
        )
    pages.write("r", 0, 0, rows(0, 40))

    assert pages.read("r", 0, 0, 40) == rows(0, 40)


def test_whole_pages_that_the_request_shares_stay_those_of_all(
    pages: KvPages, stores: Stores
) -> None:
    # given two shared pages, and a page of its own behind them
    for page, digest in enumerate((b"a" * 32, b"b" * 32)):
        key = keys.prefix_page("even2", 0, digest)
        stores.kv.run(("SET", key, rows(16 * page, 16 * page + 16)))
    stores.kv.run(("SET", keys.kv_shared("r", "even2"), b"a" * 32 + b"b" * 32))

    # when all are written again, and more
    assert pages.write_all([KvRows("r", 0, 0, rows(0, 60))]) == [None]

    # then it has only those pages of its own that nobody shares
    own = [stores.kv.run(("STRLEN", keys.kv_page("r", "even2", 0, page))) for page in range(5)]
    assert own == [0, 0, 16 * ROW, 12 * ROW, 0]
    assert pages.read("r", 0, 0, 60) == rows(0, 60)


@pytest.mark.parametrize("position", [16, 20, 32])
def test_whole_pages_behind_a_gap_leave_nothing(
    pages: KvPages, stores: Stores, position: int
) -> None:
    pages.write("r", 0, 0, rows(0, 9))

    problem = pages.write_all([KvRows("r", 0, position, rows(position, 84))])[0]

    assert isinstance(problem, KvMissing)
    own = [stores.kv.run(("STRLEN", keys.kv_page("r", "even2", 0, page))) for page in range(6)]
    assert own == [9 * ROW, 0, 0, 0, 0, 0]
