"""Writes the KV rows of a batch to the store. Knows no queue and no kernel."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Protocol

from services.worker.batch import Slice
from services.worker.compute import CacheOf
from shared.store.kv_pages import PAGE_ROWS, KvPages, KvRows
from shared.store.ledger_base import RequestLedger


class WaitRows(Protocol):
    """Waits for rows that were sent; `over` are requests that nothing is to be written for."""

    def __call__(self, over: Container[str] = ()) -> None: ...


def start_rows(
    slices: Sequence[Slice],
    cache_of: CacheOf,
    kv_pages: KvPages,
    ledger: RequestLedger,
    first_of: Callable[[Slice], int],
) -> WaitRows:
    """Send the rows of known tokens that computing these slices of one group added to the caches.

    What is returned waits until the store has them, and is called once, with the ids of requests
    that turned out to be over meanwhile.
    `first_of` says from which position on: `first_row`, or one before it.
    Rows of guesses are stored with the step that says which of them count: a row in the store is
    always that of the request's own token. So a late copy of a step can do no harm.
    The rows before them may be missing there. If the request has ended, its pages were deleted
    and nothing is to come back; if it still runs, the store lost them, and all are written from
    the cache. Raises `KvMissing` when the store loses them again meanwhile, `StoreUnavailable`.
    """
    added = [_rows(piece, cache_of, first_of(piece)) for piece in slices]
    wait_written = kv_pages.start_writes(added)

    def wait(over: Container[str] = ()) -> None:
        problems = wait_written()
        refused = [
            piece
            for piece, problem in zip(slices, problems, strict=True)
            if problem and piece.request_id not in over
        ]
        # Nothing refuses the first rows of a request that has ended, so they are looked at after
        # the write: whoever ends it later deletes them.
        first = [piece for piece, rows in zip(slices, added, strict=True) if rows.position == 0]
        if refused or first:
            _look_after(refused, first, cache_of, kv_pages, ledger)

    return wait


def _look_after(
    refused: Sequence[Slice],
    first: Sequence[Slice],
    cache_of: CacheOf,
    kv_pages: KvPages,
    ledger: RequestLedger,
) -> None:
    states = ledger.states([piece.request_id for piece in (*refused, *first)])
    running = {name for name, state in states.items() if state.finish_reason is None}
    for piece in first:
        if piece.request_id not in running:
            kv_pages.delete(piece.request_id, piece.group + 1, _known_end(piece))
    lost = [piece for piece in refused if piece.request_id in running]
    for problem in kv_pages.write_all([_rows(piece, cache_of, 0) for piece in lost]):
        if problem is not None:
            raise problem


def first_row(piece: Slice) -> int:
    """The first position whose row this slice makes known."""
    return piece.position - len(piece.accepted)


def fills_page(piece: Slice) -> bool:
    """Whether the rows that a slice makes known reach the end of a page."""
    return first_row(piece) // PAGE_ROWS != _known_end(piece) // PAGE_ROWS


def _known_end(piece: Slice) -> int:
    """The position after the slice's last known token."""
    return piece.position + piece.num_rows - len(piece.draft)


def _rows(piece: Slice, cache_of: CacheOf, start: int) -> KvRows:
    """Rows from position `start` to the slice's last known token, as the store takes them."""
    end = _known_end(piece)
    rows = cache_of(piece).export_rows(start, end)
    return KvRows(piece.request_id, piece.group, start, rows)
