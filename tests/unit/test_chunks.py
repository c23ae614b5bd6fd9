"""Facts about chunk geometry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ConfigError, KernelError
from shared.kernel.chunks import (
    BLOCK_ROWS,
    DEFAULT_LOCAL_STORE_BYTES,
    MAX_CHUNK_BYTES,
    block_bytes,
    choose_chunk_rows,
    chunk_bytes,
    local_store_need,
    matrix_bytes,
    num_blocks,
    num_chunks,
    streamed_need,
)

KINDS = st.sampled_from(["int4", "int8"])
COLS = st.integers(1, 200).map(lambda groups: 32 * groups)
STORES = st.integers(64, 512).map(lambda kib: 1024 * kib)


@given(kind=KINDS, rows=st.integers(1, 50_000), cols=COLS, store=STORES)
def test_a_chosen_chunk_fits_the_store_and_no_larger_one_would(
    kind: str, rows: int, cols: int, store: int
) -> None:
    chunk_rows = choose_chunk_rows(kind, rows, cols, local_store_bytes=store)

    if local_store_need(kind, cols, BLOCK_ROWS) > store:
        assert chunk_rows == BLOCK_ROWS
        assert streamed_need(kind, cols) <= store
        return

    assert chunk_rows % BLOCK_ROWS == 0
    assert local_store_need(kind, cols, chunk_rows) <= store
    blocks = chunk_rows // BLOCK_ROWS
    size = block_bytes(kind, cols)
    assert blocks == 1 or blocks * size <= MAX_CHUNK_BYTES
    larger_fits = local_store_need(kind, cols, chunk_rows + BLOCK_ROWS) <= store
    larger_is_small = (blocks + 1) * size <= MAX_CHUNK_BYTES
    assert blocks == num_blocks(rows) or not (larger_fits and larger_is_small)


@given(kind=KINDS, rows=st.integers(1, 3000), cols=COLS, blocks=st.integers(1, 20))
def test_a_matrix_is_its_chunks_one_after_the_other(
    kind: str, rows: int, cols: int, blocks: int
) -> None:
    chunk_rows = blocks * BLOCK_ROWS

    sizes = [
        chunk_bytes(kind, cols, min(chunk_rows, rows - first))
        for first in range(0, rows, chunk_rows)
    ]

    assert len(sizes) == num_chunks(rows, chunk_rows)
    assert matrix_bytes(kind, rows, cols, chunk_rows) == sum(sizes)
    assert all(size % 128 == 0 for size in sizes)


def test_smollm2_sizes() -> None:
    assert block_bytes("int4", 576) == 18 * 320
    assert block_bytes("int8", 576) == 18 * 32 + 18 * 512  # 576 is a multiple of 64
    assert block_bytes("int8", 32) == 64 + 512  # 32 bytes of scales, padded
    assert choose_chunk_rows("int4", 1536, 576) == 17 * 16
    assert choose_chunk_rows("int4", 576, 1536) == 6 * 16


def test_one_block_may_be_larger_than_96_kib_if_the_store_takes_it_twice() -> None:
    assert block_bytes("int4", 11008) > MAX_CHUNK_BYTES

    assert choose_chunk_rows("int4", 4096, 11008) == 16


@pytest.mark.parametrize(("kind", "cols"), [("int4", 14336), ("int8", 11008), ("int8", 29568)])
def test_a_row_block_too_large_for_the_store_passes_through_in_parts(kind: str, cols: int) -> None:
    assert local_store_need(kind, cols, BLOCK_ROWS) > DEFAULT_LOCAL_STORE_BYTES

    assert choose_chunk_rows(kind, 4096, cols) == BLOCK_ROWS


def test_a_store_that_takes_no_part_of_a_block_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="16384 is too small") as caught:
        choose_chunk_rows("int4", 4096, 14336, local_store_bytes=1 << 14)

    assert f"set local_store_bytes to {streamed_need('int4', 14336)}" in caught.value.remedy


@pytest.mark.parametrize("cols", [0, -32, 33])
def test_cols_not_in_groups_of_32_are_refused(cols: int) -> None:
    with pytest.raises(KernelError, match=f"got {cols}"):
        block_bytes("int4", cols)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(KernelError, match="int5"):
        block_bytes("int5", 32)


@pytest.mark.parametrize("chunk_rows", [0, 8, -16])
def test_chunk_rows_not_in_blocks_of_16_are_refused(chunk_rows: int) -> None:
    with pytest.raises(KernelError, match=f"got {chunk_rows}"):
        num_chunks(100, chunk_rows)
