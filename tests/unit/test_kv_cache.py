"""Facts about the KV that a worker keeps of a sequence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import KernelError, KvMissing
from shared.model.kv_cache import SequenceCache

LAYERS, HEADS, HEAD_DIM = 3, 2, 8
ROW_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 2


def new_cache() -> SequenceCache:
    return SequenceCache(LAYERS, HEADS, HEAD_DIM)


def random_rows(num_rows: int, seed: int = 0) -> bytes:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 0x7C00, num_rows * ROW_BYTES // 2).astype("<u2").tobytes()


@given(total=st.integers(0, 70), cuts=st.lists(st.integers(0, 70), max_size=4))
@settings(deadline=None)
def test_rows_come_back_whatever_pieces_they_came_in(total: int, cuts: list[int]) -> None:
    data = random_rows(total)
    bounds = [0, *sorted(min(c, total) for c in cuts), total]
    cache = new_cache()

    for start, stop in itertools.pairwise(bounds):
        cache.import_rows(start, data[start * ROW_BYTES : stop * ROW_BYTES])

    assert cache.num_positions == total
    assert cache.export_rows(0, total) == data
    middle = total // 3
    assert cache.export_rows(middle, total) == data[middle * ROW_BYTES :]


def test_a_row_is_for_each_layer_keys_then_values_of_each_head() -> None:
    cache = new_cache()
    cache.ensure_capacity(20)
    for layer in range(LAYERS):
        for part in range(2):
            for head in range(HEADS):
                values = 100 * layer + 10 * part + head + np.arange(HEAD_DIM) * 1000
                cache.pages[1][layer, head, part, 17 - 16] = values
    cache.advance(18)

    row = np.frombuffer(cache.export_rows(17, 18), "<u2")

    want = [
        100 * layer + 10 * part + head + 1000 * i
        for layer in range(LAYERS)
        for part in range(2)
        for head in range(HEADS)
        for i in range(HEAD_DIM)
    ]
    assert row.tolist() == want
    assert cache.row_bytes == len(row) * 2 == ROW_BYTES


def test_rows_that_are_not_here_are_missing_and_not_zeros() -> None:
    cache = new_cache()
    cache.import_rows(0, random_rows(5))

    with pytest.raises(KvMissing, match=r"4\.\.6"):
        cache.export_rows(4, 6)


def test_a_gap_and_a_torn_row_are_refused() -> None:
    cache = new_cache()
    cache.import_rows(0, random_rows(5))

    with pytest.raises(KvMissing, match="gap"):
        cache.import_rows(6, random_rows(1))
    with pytest.raises(KvMissing, match="no multiple"):
        cache.import_rows(5, random_rows(1)[:-2])
    assert cache.num_positions == 5


def test_rows_with_infinity_or_nan_are_refused() -> None:
    data = bytearray(random_rows(2))
    data[-2:] = np.float16(np.nan).tobytes()

    with pytest.raises(KernelError, match="not finite"):
        new_cache().import_rows(0, data)


def test_truncating_forgets_rows_and_frees_their_pages() -> None:
    cache = new_cache()
    cache.import_rows(0, random_rows(40))
    assert cache.nbytes == 3 * 16 * ROW_BYTES

    cache.truncate(16)

    assert cache.num_positions == 16
    assert cache.nbytes == 16 * ROW_BYTES
    assert cache.export_rows(0, 16) == random_rows(40)[: 16 * ROW_BYTES]
    cache.truncate(30)  # beyond the end: nothing to forget
    assert cache.num_positions == 16


def test_pages_are_aligned_and_their_addresses_are_known() -> None:
    cache = new_cache()

    cache.ensure_capacity(33)

    assert len(cache.pages) == 3
    assert cache.page_addresses.tolist() == [page.ctypes.data for page in cache.pages]
    assert not (cache.page_addresses % 64).any()
