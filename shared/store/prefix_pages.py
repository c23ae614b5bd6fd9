"""Pages of keys and values that requests share: those of what their prompts begin with.

A full page is addressed by the model, the layout, the group and the digest of all tokens up to its
end, so equal beginnings find each other; pages that are not full stay with their request. Pages
are moved, not copied, from the request that computed them (`kv_pages.py`), and listed for those
that use them. Those used longest ago go when there are too many. Knows no request's record.

A page may be gone whenever it is read: then rows are missing, and are computed again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from shared.errors import StoreDamaged
from shared.store import keys
from shared.store.connection import Argument, Call, Command, Connection
from shared.store.kv_pages import DIGEST_BYTES, PAGE_ROWS
from shared.store.scripts import load_script
from shared.topology import Layout

_SCRIPT_KEYS = 1024  # of one call: the server does nothing else meanwhile
_MAX_EVICTED = 1024  # pages of one call
_NEARLY_FULL = 0.9  # of the server's maxmemory
_RELIEF_PAGES = 64


def page_digests(layout: Layout, token_ids: Sequence[int]) -> list[bytes]:
    """The digest of every full page of a sequence, each of all tokens up to the page's end.

    SHA-256 over the digest before and 16 token ids, beginning with the model and the layout. The
    model's id holds the digest of its weights and the version of the arithmetic.
    """
    digest = hashlib.sha256(f"{layout.model_id}\n{layout.to_json()}".encode()).digest()
    packed = np.asarray(token_ids, "<i4").tobytes()
    page_bytes = 4 * PAGE_ROWS
    digests = []
    for start in range(0, len(packed) - page_bytes + 1, page_bytes):
        digest = hashlib.sha256(digest + packed[start : start + page_bytes]).digest()
        digests.append(digest)
    return digests


class StoredPrefixes:
    """The shared pages of one layout, at most `max_bytes` of them in all.

    They live `ttl_s` after their last use. Raises `StoreUnavailable`. What is garbled is dropped.
    """

    def __init__(
        self,
        kv: Connection,
        layout: Layout,
        row_bytes_per_layer: int,
        *,
        max_bytes: int,
        ttl_s: float = 3_600,
    ) -> None:
        self._kv = kv
        self._layout_id = layout.layout_id
        self._groups = range(layout.num_groups)
        self._page_bytes = [
            layout.num_layers(group) * row_bytes_per_layer * PAGE_ROWS for group in self._groups
        ]
        self._max_pages = max_bytes // sum(self._page_bytes)
        self._ttl_ms = round(ttl_s * 1000)
        self._uses = keys.prefix_uses(layout.model_id, layout.layout_id)

    def attach(self, request_id: str, digests: Sequence[bytes]) -> int:
        """Let a request's first pages be shared ones: as many as every group has, without a gap.

        Returns their number; those it had before are no longer listed.
        """
        try:
            return self._attach(request_id, digests[: self._num_known(digests)])
        except StoreDamaged:
            self._reset(request_id)
            return 0

    def share(self, request_id: str, digests: Sequence[bytes]) -> int:
        """Move a request's full pages to where others find them; `digests` are those of its tokens.

        Returns how many of them are shared now. It goes on reading them from there.
        """
        try:
            num_shared = self._share(request_id, digests[: self._max_pages])
            self._evict()
        except StoreDamaged:
            self._reset(request_id)
            return 0
        return num_shared

    def relieve(self) -> None:
        """Give way when the server's memory is nearly full: the rows of what runs come first."""
        told = self._kv.run(("INFO", "memory")).decode().split()
        memory = dict(line.split(":", 1) for line in told if ":" in line)
        used_bytes, max_bytes = int(memory["used_memory"]), int(memory["maxmemory"])
        if max_bytes and used_bytes > _NEARLY_FULL * max_bytes:
            self._evict(at_least=_RELIEF_PAGES)

    def release(self, request_id: str) -> None:
        """A request has ended: its list goes with its own pages."""

    def num_bytes(self) -> int:
        """Bytes of the shared pages."""
        return int(self._kv.run(("ZCARD", self._uses))) * sum(self._page_bytes)

    def _num_known(self, digests: Sequence[bytes]) -> int:
        """How many of the first digests were shared once; that most have none costs one command."""
        if not digests:
            return 0
        scores = self._kv.run(("ZMSCORE", self._uses, *digests))
        return next((i for i, score in enumerate(scores) if score is None), len(digests))

    def _attach(self, request_id: str, digests: Sequence[bytes]) -> int:
        listed = keys.kv_shared(request_id, self._layout_id)
        if not digests:
            self._kv.run(("DEL", listed))
        a_call = max(1, _SCRIPT_KEYS // len(self._groups))
        for first in range(0, len(digests), a_call):
            part = digests[first : first + a_call]
            pages = [
                keys.prefix_page(self._layout_id, group, digest)
                for digest in part
                for group in self._groups
            ]
            found = self._kv.run(
                Call(
                    load_script("prefix_attach"),
                    (listed, self._uses, *pages),
                    (first, len(self._groups), self._ttl_ms, *part),
                )
            )
            if found < len(part):
                return first + int(found)
        return len(digests)

    def _share(self, request_id: str, digests: Sequence[bytes]) -> int:
        a_call = max(1, _SCRIPT_KEYS // (2 * len(self._groups)))
        for first in range(0, len(digests), a_call):
            part = digests[first : first + a_call]
            pages = []
            for number, digest in enumerate(part, first):
                own = [
                    keys.kv_page(request_id, self._layout_id, group, number)
                    for group in self._groups
                ]
                shared = [
                    keys.prefix_page(self._layout_id, group, digest) for group in self._groups
                ]
                pages += own + shared
            args: list[Argument] = [first, len(self._groups), self._ttl_ms]
            done = self._kv.run(
                Call(
                    load_script("prefix_share"),
                    (keys.kv_shared(request_id, self._layout_id), self._uses, *pages),
                    (*args, *self._page_bytes, *part),
                )
            )
            if done < len(part):
                return first + int(done)
        return len(digests)

    def _evict(self, *, at_least: int = 0) -> None:
        """Delete what is too much, the longest unused first, and forget what has expired."""
        (now_s, _), num_pages = self._kv.run_all([("TIME",), ("ZCARD", self._uses)])
        commands: list[Command] = []
        excess = min(max(num_pages - self._max_pages, at_least), _MAX_EVICTED)
        if excess > 0:
            for digest in self._kv.run(("ZRANGE", self._uses, 0, excess - 1)):
                pages = [keys.prefix_page(self._layout_id, group, digest) for group in self._groups]
                # Listed until it is gone: what dies in between leaves nothing uncounted.
                commands += [("UNLINK", *pages), ("ZREM", self._uses, digest)]
        expired_us = (int(now_s) * 1000 - self._ttl_ms) * 1000
        commands.append(("ZREMRANGEBYSCORE", self._uses, "-inf", expired_us))
        self._kv.run_all(commands)

    def _reset(self, request_id: str) -> None:
        """Forget which pages there are; those that nobody finds again expire."""
        self._kv.run(("UNLINK", self._uses, keys.kv_shared(request_id, self._layout_id)))


assert len(hashlib.sha256().digest()) == DIGEST_BYTES
