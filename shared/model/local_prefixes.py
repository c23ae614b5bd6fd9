"""Pages of keys and values that sequences of this process share. Knows no store and no token.

Full pages are never written again, so sequences that begin alike hold the same arrays: nothing is
copied. The digest of a page names all tokens up to its end.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from shared.model.kv_cache import PAGE_POSITIONS, Page, SequenceCache


class LocalPrefixes:
    """The pages of `num_groups` layer groups, at most `max_bytes` in all, the last used ones.

    May be used from any thread. Caches of a request are those made between `attach` and `release`.
    """

    def __init__(self, num_groups: int, *, max_bytes: int) -> None:
        self._num_groups = num_groups
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pages: OrderedDict[bytes, list[Page]] = OrderedDict()  # of all groups, by digest
        self._attached: dict[str, list[list[Page]]] = {}
        self._caches: dict[str, dict[int, SequenceCache]] = {}
        self._lock = threading.Lock()

    def attach(self, request_id: str, digests: Sequence[bytes]) -> int:
        """Let a request's caches begin with the pages that are here; returns their number."""
        with self._lock:
            found = []
            for digest in digests:
                if digest not in self._pages:
                    break
                found.append(self._pages[digest])
            self._touch(digests[: len(found)])
            self._attached[request_id] = found
            self._caches[request_id] = {}
            return len(found)

    def open_cache(
        self, group: int, request_id: str, make_cache: Callable[[int], SequenceCache]
    ) -> SequenceCache:
        """The cache of a request in a group, with what is shared in it."""
        cache = make_cache(group)
        with self._lock:
            caches = self._caches.get(request_id)
            if caches is not None:
                cache.adopt_pages([pages[group] for pages in self._attached[request_id]])
                caches[group] = cache
        return cache

    def share(self, request_id: str, digests: Sequence[bytes]) -> int:
        """Let others begin with a request's full pages; returns how many are shared now."""
        with self._lock:
            caches = self._caches.get(request_id, {})
            if len(caches) < self._num_groups:
                return 0
            num_full = min(cache.num_positions // PAGE_POSITIONS for cache in caches.values())
            shared = digests[:num_full]
            for number, digest in enumerate(shared):
                if digest not in self._pages:
                    pages = [caches[group].pages[number] for group in range(self._num_groups)]
                    self._pages[digest] = pages
                    self._num_bytes += sum(page.nbytes for page in pages)
            self._touch(shared)
            while self._num_bytes > self._max_bytes:
                _, gone = self._pages.popitem(last=False)
                self._num_bytes -= sum(page.nbytes for page in gone)
            return len(shared)

    def relieve(self) -> None:
        """This process has no limit but `max_bytes`."""

    def release(self, request_id: str) -> None:
        """A request has ended; what it shares stays."""
        with self._lock:
            self._attached.pop(request_id, None)
            self._caches.pop(request_id, None)

    def num_bytes(self) -> int:
        """Bytes of the shared pages."""
        return self._num_bytes

    def _touch(self, digests: Sequence[bytes]) -> None:
        # Without the pages before it a page is of no use: of one prompt the last ones go first.
        for digest in reversed(digests):
            self._pages.move_to_end(digest)
