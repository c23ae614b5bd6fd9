"""Owns the keys and values that one worker keeps of one sequence. Knows no store and no kernel.

Pages of 16 positions, in the shape the kernel reads; rows, in the shape the store keeps: per
position, for each layer of the group, keys then values, fp16 little-endian, kv heads in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError, KvMissing
from shared.kernel.chunks import aligned_zeros

PAGE_POSITIONS = 16

Page = npt.NDArray[np.uint16]  # (layers, kv heads, 2: keys and values, 16, head_dim)


class SequenceCache:
    """KV of one sequence in the layers of one group.

    Rows 0..num_positions-1 are valid. Behind them memory may exist; it is never read.
    """

    def __init__(self, num_layers: int, num_key_value_heads: int, head_dim: int) -> None:
        self.num_positions = 0
        self.pages: list[Page] = []
        self.page_addresses = np.empty(0, np.uintp)  # of the pages' first bytes, for the kernel
        self._page_shape = (num_layers, num_key_value_heads, 2, PAGE_POSITIONS, head_dim)
        self.page_bytes = 2 * math.prod(self._page_shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return self.page_bytes // PAGE_POSITIONS

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that exist."""
        return len(self.pages) * self.page_bytes

    def bytes_for(self, end_position: int) -> int:
        """Bytes of the pages of positions 0..end_position-1."""
        return -(-end_position // PAGE_POSITIONS) * self.page_bytes

    def adopt_pages(self, pages: Sequence[Page]) -> None:
        """Begin with full pages that other sequences hold too; nobody writes to them again."""
        assert not self.pages, "only a new cache begins with pages of others"
        self._add(pages)
        self.num_positions = len(pages) * PAGE_POSITIONS

    def ensure_capacity(self, end_position: int) -> None:
        """Make pages for positions 0..end_position-1."""
        wanted = -(-end_position // PAGE_POSITIONS)
        if wanted <= len(self.pages):
            return
        self._add(
            [aligned_zeros(self._page_shape, np.uint16) for _ in range(wanted - len(self.pages))]
        )

    def advance(self, end_position: int) -> None:
        """Declare rows 0..end_position-1 valid: the kernel has written them."""
        assert end_position <= len(self.pages) * PAGE_POSITIONS
        self.num_positions = end_position

    def truncate(self, position: int) -> None:
        """Forget rows from `position` on, and the pages that held only those."""
        if position < 0:
            raise KernelError(f"position must not be negative, got {position}")
        self.num_positions = min(self.num_positions, position)
        wanted = -(-self.num_positions // PAGE_POSITIONS)
        if wanted < len(self.pages):
            del self.pages[wanted:]
            self.page_addresses = self.page_addresses[:wanted]

    def export_rows(self, start: int, stop: int) -> bytes:
        """Rows start..stop-1 as the store keeps them. Raises `KvMissing` for rows not here."""
        if not 0 <= start <= stop <= self.num_positions:
            raise KvMissing(f"KV rows {start}..{stop} asked, 0..{self.num_positions} are here")
        pieces = []
        for page, first, end in self._spans(start, stop):
            rows = self.pages[page][:, :, :, first:end]  # (L, K, 2, n, hd)
            pieces.append(rows.transpose(3, 0, 2, 1, 4).astype("<u2", copy=False).tobytes())
        return b"".join(pieces)

    def import_rows(self, start: int, data: bytes | bytearray | memoryview) -> None:
        """Take rows from `start` on, as `export_rows` gave them.

        Raises `KvMissing` when they leave a gap or end inside a row, `KernelError` when they hold
        infinity or NaN, which a cache never wrote.
        """
        if not 0 <= start <= self.num_positions:
            raise KvMissing(f"KV rows from {start} leave a gap: 0..{self.num_positions} are here")
        num_rows, rest = divmod(len(data), self.row_bytes)
        if rest:
            raise KvMissing(f"KV data of {len(data)} bytes is no multiple of {self.row_bytes}")
        layers, heads, parts, _, head_dim = self._page_shape
        rows = np.frombuffer(data, "<u2").reshape(num_rows, layers, parts, heads, head_dim)
        if ((rows & 0x7C00) == 0x7C00).any():
            raise KernelError(f"KV rows from {start} hold a value that is not finite")
        self.ensure_capacity(start + num_rows)
        taken = 0
        for page, first, end in self._spans(start, start + num_rows):
            part = rows[taken : taken + end - first]
            self.pages[page][:, :, :, first:end] = part.transpose(1, 3, 2, 0, 4)
            taken += end - first
        self.num_positions = max(self.num_positions, start + num_rows)

    def _spans(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(page, first slot, end slot) of each page that positions start..stop-1 touch."""
        spans = []
        while start < stop:
            page, first = divmod(start, PAGE_POSITIONS)
            end = min(PAGE_POSITIONS, first + stop - start)
            spans.append((page, first, end))
            start += end - first
        return spans

    def _add(self, pages: Sequence[Page]) -> None:
        self.pages += pages
        addresses = np.array([page.ctypes.data for page in pages], np.uintp)
        self.page_addresses = np.concatenate([self.page_addresses, addresses])
