"""Pages of keys and values: what a layer group remembers of a request. Knows no attention.

A row holds the keys and values of one position in all layers of a group; a page holds 16 rows,
position-major, in one Redis string. Rows of a request in a group are contiguous from position 0:
a write that would leave a gap is refused, and a read of what is not there is an error. Neither
ever yields zeros. Rows are a function of the tokens alone, so writing them again is harmless.

The first pages of a request may be shared with others (`prefix_pages.py`): a list of digests in the
store, one a page, says which pages stand for them. All that is read, counted or written goes by it.

A Redis string of a page is best below 1 MiB (64 KiB rows) and at most 8 MiB. Longer than other
modules: where rows lie is known here alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.errors import ConfigError, KvMissing, StoreDamaged
from shared.store import keys
from shared.store.connection import Call, Command, Connection
from shared.store.scripts import load_script
from shared.topology import Layout

PAGE_ROWS = 16
DIGEST_BYTES = 32
MAX_PAGE_BYTES = 8 << 20
# A long request would outlive its first pages; refreshing them all at every 16th page costs half
# a command a token at 2,048 positions.
_REFRESH_PAGES = 16
_DELETE_KEYS = 512


@dataclass(frozen=True, slots=True)
class KvRows:
    """Rows to write: n * row_bytes bytes for positions position..position+n-1 of one group."""

    request_id: str
    group: int
    position: int
    rows: bytes | bytearray | memoryview


class KvPages:
    """The pages of one layout. `row_bytes[g]` is the size of one row in group g.

    Raises `ConfigError` for a group whose page would be over 8 MiB, and `StoreUnavailable` when
    the store does not answer or is full. Pages vanish `ttl_s` after the last write to them or, for
    a request that goes on, after its last 256 positions.
    """

    def __init__(
        self, kv: Connection, layout_id: str, row_bytes: Sequence[int], *, ttl_s: float = 3_600
    ) -> None:
        for group, size in enumerate(row_bytes):
            if not 0 < size * PAGE_ROWS <= MAX_PAGE_BYTES:
                raise ConfigError(
                    f"group {group} of layout {layout_id} has KV rows of {size} bytes; "
                    f"a page of {PAGE_ROWS} must be in 1..{MAX_PAGE_BYTES} bytes",
                    remedy="cut the model into more groups: cellpipe load MODEL --groups N",
                )
        self._kv = kv
        self._layout_id = layout_id
        self._row_bytes = tuple(row_bytes)
        self._ttl_ms = round(ttl_s * 1000)

    @classmethod
    def of_layout(cls, kv: Connection, layout: Layout, row_bytes_per_layer: int) -> KvPages:
        """The pages of a layout: a row is all layers of a group at one position."""
        row_bytes = [
            layout.num_layers(group) * row_bytes_per_layer for group in range(layout.num_groups)
        ]
        return cls(kv, layout.layout_id, row_bytes)

    def write(
        self, request_id: str, group: int, position: int, rows: bytes | bytearray | memoryview
    ) -> None:
        """Write consecutive rows. Raises `KvMissing` when rows before `position` are missing."""
        if problem := self.write_all([KvRows(request_id, group, position, rows)])[0]:
            raise problem

    def write_all(self, writes: Sequence[KvRows]) -> list[KvMissing | None]:
        """Write the rows of a batch in one round trip; what went wrong, one for each of `writes`.

        Raises `ValueError` for rows that are not a whole, positive number of rows.
        """
        return self.start_writes(writes)()

    def start_writes(self, writes: Sequence[KvRows]) -> Callable[[], list[KvMissing | None]]:
        """Send what `write_all` writes. What is returned waits for it, and is called once."""
        commands: list[Command | Call] = []
        ends = []
        for write in writes:
            commands += self._write_calls(write)
            ends.append(len(commands))
        wait_written = self._kv.start_all(commands)

        def wait() -> list[KvMissing | None]:
            replies = wait_written()
            self._kv.run_all([touch for write in writes for touch in self._refresh(write)])
            return [
                None
                if all(replies[start:end])
                else KvMissing(
                    f"request {w.request_id}: group {w.group} has no rows right before "
                    f"position {w.position}"
                )
                for w, start, end in zip(writes, [0, *ends], ends, strict=False)
            ]

        return wait

    def read(self, request_id: str, group: int, start: int, stop: int) -> bytes:
        """The (stop-start) * row_bytes bytes of positions start..stop-1.

        Raises `KvMissing` unless all of them are there.
        """
        size = self._row_bytes[group]
        shared = self.shared(request_id)
        commands: list[Command] = []
        for page in range(start // PAGE_ROWS, -(-stop // PAGE_ROWS)):
            first = max(start - page * PAGE_ROWS, 0)
            end = min(stop - page * PAGE_ROWS, PAGE_ROWS)
            key = self._place(request_id, group, page, shared)
            commands.append(("GETRANGE", key, first * size, end * size - 1))
        rows = b"".join(self._kv.run_all(commands))
        # Only the last page can be short without a gap, so the sum tells all.
        if len(rows) != (stop - start) * size:
            raise KvMissing(
                f"request {request_id}: group {group} holds {len(rows) // size} of the rows "
                f"of positions {start}..{stop - 1}"
            )
        return rows

    def num_rows(self, request_id: str, group: int) -> int:
        """How many rows there are from position 0 without a gap."""
        num_rows, shared = 0, self.shared(request_id)
        while True:
            found = self._count(request_id, (group,), num_rows // PAGE_ROWS, 64, shared)[0]
            num_rows += found
            if found < 64 * PAGE_ROWS:
                return num_rows

    def rows_by_group(self, request_id: str, num_positions: int) -> list[int]:
        """`num_rows` of every group, counted up to `num_positions`, in two round trips.

        Their minimum is where a re-drive starts.
        """
        num_pages = -(-num_positions // PAGE_ROWS)
        groups, shared = range(len(self._row_bytes)), self.shared(request_id)
        counts = self._count(request_id, groups, 0, num_pages, shared)
        return [min(count, num_positions) for count in counts]

    def delete(self, request_id: str, num_groups: int, num_positions: int) -> None:
        """Drop its own pages of positions 0..num_positions-1 in groups 0..num_groups-1.

        What it shares with others stays with them.
        """
        pages = [keys.kv_shared(request_id, self._layout_id)]
        pages += [
            self._key(request_id, group, page)
            for group in range(num_groups)
            for page in range(-(-num_positions // PAGE_ROWS))
        ]
        self._kv.run_all(
            [
                ("UNLINK", *pages[first : first + _DELETE_KEYS])
                for first in range(0, len(pages), _DELETE_KEYS)
            ]
        )

    def shared(self, request_id: str) -> list[bytes]:
        """The digests of the shared pages that stand for its first ones; empty without any."""
        key = keys.kv_shared(request_id, self._layout_id)
        listed = self._kv.run_all([("GET", key)], keep=(StoreDamaged,))[0]
        if not isinstance(listed, bytes):  # none, or garbled: then its rows are missing
            return []
        whole = len(listed) // DIGEST_BYTES * DIGEST_BYTES
        return [listed[i : i + DIGEST_BYTES] for i in range(0, whole, DIGEST_BYTES)]

    def keep_shared(self, request_id: str, position: int) -> None:
        """Let only rows before `position` be shared ones: the others are computed again."""
        keep_bytes = -(-position // PAGE_ROWS) * DIGEST_BYTES
        key = keys.kv_shared(request_id, self._layout_id)
        self._kv.run(Call(load_script("kv_unlist"), (key,), (keep_bytes,)))

    def drop_shared(self, request_id: str, group: int) -> bool:
        """Delete the shared pages of a request in one group, for all. False when there are none."""
        shared = self.shared(request_id)
        if shared:
            pages = [keys.prefix_page(self._layout_id, group, digest) for digest in shared]
            self._kv.run(("UNLINK", *pages))
        return bool(shared)

    def _place(self, request_id: str, group: int, page: int, shared: Sequence[bytes]) -> str:
        """The key that holds a page of a request: a shared one, or its own."""
        if page < len(shared):
            return keys.prefix_page(self._layout_id, group, shared[page])
        return self._key(request_id, group, page)

    def _key(self, request_id: str, group: int, page: int) -> str:
        return keys.kv_page(request_id, self._layout_id, group, page)

    def _write_calls(self, write: KvRows) -> list[Command | Call]:
        """All of them answer something true once the rows are there.

        Whole pages are set (one of 368 KB through a script took 2.8 ms, set and kept 0.3 to 0.4);
        what begins or ends inside a page goes through a script.
        """
        size, rows = self._row_bytes[write.group], memoryview(write.rows)
        num_rows, rest = divmod(rows.nbytes, size)
        if rest or not num_rows:
            raise ValueError(
                f"rows of group {write.group} must be a multiple of {size} bytes, got {rows.nbytes}"
            )
        start, stop = write.position, write.position + num_rows
        whole_from = -(-start // PAGE_ROWS) * PAGE_ROWS
        whole_to = stop // PAGE_ROWS * PAGE_ROWS
        if whole_from >= whole_to:
            return [self._part_call(write, start, stop)]
        head = [self._part_call(write, start, whole_from)] if start < whole_from else []
        return [*head, *self._page_calls(write, whole_from, whole_to, stop)]

    def _page_calls(self, write: KvRows, start: int, end: int, stop: int) -> list[Command | Call]:
        """Set the whole pages of positions start..end-1, keep them if they leave no gap, and write
        the rest, up to stop-1, behind them."""
        size, rows = self._row_bytes[write.group], memoryview(write.rows)
        first, num_pages = start // PAGE_ROWS, (end - start) // PAGE_ROWS
        keys_from = max(first - 1, 0)
        pages = [
            self._key(write.request_id, write.group, page)
            for page in range(keys_from, -(-stop // PAGE_ROWS))
        ]
        at = [(start - write.position + i * PAGE_ROWS) * size for i in range(num_pages + 1)]
        sets: list[Command | Call] = [
            ("SET", pages[first - keys_from + i], rows[at[i] : at[i + 1]], "PX", self._ttl_ms)
            for i in range(num_pages)
        ]
        rest = [bytes(rows[at[-1] :])] if end < stop else []
        keep = Call(
            load_script("kv_keep"),
            [keys.kv_shared(write.request_id, self._layout_id), *pages],
            (PAGE_ROWS * size, self._ttl_ms, first, DIGEST_BYTES, *rest),
        )
        return [*sets, keep]

    def _part_call(self, write: KvRows, start: int, stop: int) -> Call:
        """Rows of positions start..stop-1, which begin or end inside a page."""
        size = self._row_bytes[write.group]
        first, row = divmod(start, PAGE_ROWS)
        needs_page_before = row == 0 and first > 0
        pages = range(first - needs_page_before, (stop - 1) // PAGE_ROWS + 1)
        rows = memoryview(write.rows)[(start - write.position) * size :][: (stop - start) * size]
        return Call(
            load_script("kv_write"),
            [
                keys.kv_shared(write.request_id, self._layout_id),
                *(self._key(write.request_id, write.group, page) for page in pages),
            ],
            (
                PAGE_ROWS * size,
                row * size,
                self._ttl_ms,
                int(needs_page_before),
                first,
                DIGEST_BYTES,
                bytes(rows),
            ),
        )

    def _refresh(self, write: KvRows) -> list[Command]:
        """PEXPIRE for all earlier pages when the rows begin a page whose number says so."""
        num_rows = memoryview(write.rows).nbytes // self._row_bytes[write.group]
        first = -(-write.position // PAGE_ROWS)
        last = (write.position + num_rows - 1) // PAGE_ROWS
        if not any(page and page % _REFRESH_PAGES == 0 for page in range(first, last + 1)):
            return []
        return [
            ("PEXPIRE", self._key(write.request_id, write.group, page), self._ttl_ms)
            for page in range(first)
        ]

    def _count(
        self,
        request_id: str,
        groups: Sequence[int],
        first_page: int,
        num_pages: int,
        shared: Sequence[bytes],
    ) -> list[int]:
        lengths = self._kv.run_all(
            [
                ("STRLEN", self._place(request_id, group, first_page + page, shared))
                for group in groups
                for page in range(num_pages)
            ],
            keep=(StoreDamaged,),
        )
        counts = []
        for number, group in enumerate(groups):
            count = 0
            for length in lengths[number * num_pages : (number + 1) * num_pages]:
                # What is of another type holds no rows.
                length = length if isinstance(length, int) else 0
                rows = min(length // self._row_bytes[group], PAGE_ROWS)
                count += rows
                if rows < PAGE_ROWS:
                    break
            counts.append(count)
        return counts
