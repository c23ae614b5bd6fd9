"""Decides what of a request is shared with others, and when. Knows no page and no step.

A request begins after the longest prefix of its prompt that every layer group has. Its own full
pages are shared once its first token is there, which says that the prompt was computed, and again
with its answer at its end, unless it failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import structlog

from shared.errors import StoreUnavailable
from shared.messages import FinishReason
from shared.store.kv_pages import PAGE_ROWS
from shared.store.ledger_types import LedgerRecord
from shared.store.prefix_pages import page_digests
from shared.topology import Layout

log = structlog.get_logger()

_RELIEF_EVERY_S = 1.0


class PrefixPages(Protocol):
    """Where shared pages are: in the store, or in this process."""

    def attach(self, request_id: str, digests: Sequence[bytes]) -> int: ...

    def share(self, request_id: str, digests: Sequence[bytes]) -> int: ...

    def relieve(self) -> None: ...

    def release(self, request_id: str) -> None: ...


class Prefixes:
    """`pages` None shares nothing."""

    def __init__(self, pages: PrefixPages | None, layout: Layout) -> None:
        self._pages = pages
        self._layout = layout
        self._next_relief_s = 0.0
        self._prompts: dict[str, tuple[int, list[bytes]]] = {}  # not shared yet: length, digests

    def attach(self, record: LedgerRecord) -> int:
        """The position at which a request's prompt is to begin; the rows before it are there.

        The prompt's last token is always computed: the first new one is drawn from it. Raises
        `StoreUnavailable`.
        """
        if self._pages is None:
            return 0
        num_prompt = record.num_prompt_tokens
        digests = page_digests(self._layout, record.prompt_token_ids)
        num_pages = self._pages.attach(record.request_id, digests[: (num_prompt - 1) // PAGE_ROWS])
        if num_pages < len(digests):
            self._prompts[record.request_id] = (num_prompt, digests)
        return num_pages * PAGE_ROWS

    def committed(self, request_id: str, position: int) -> None:
        """Share the prompt of a request whose token at `position` is there, if it is one."""
        num_prompt, digests = self._prompts.get(request_id, (0, []))
        if digests and position >= num_prompt:
            del self._prompts[request_id]
            self._share(request_id, digests)

    def ended(self, record: LedgerRecord, generated: Sequence[int]) -> None:
        """Share what was computed for a request that has ended, and let go of it."""
        self._prompts.pop(record.request_id, None)
        if self._pages is None:
            return
        if record.finish_reason is not FinishReason.ERROR:
            # The last token was never fed back: it has no row.
            token_ids = [*record.prompt_token_ids, *generated][:-1]
            self._share(record.request_id, page_digests(self._layout, token_ids))
        self._pages.release(record.request_id)

    def relieve(self, now_s: float) -> None:
        """See now and then that shared pages take no memory that rows of requests need."""
        if self._pages is None or now_s < self._next_relief_s:
            return
        self._next_relief_s = now_s + _RELIEF_EVERY_S
        try:
            self._pages.relieve()
        except StoreUnavailable as error:
            log.debug("prefix_not_relieved", reason=str(error))

    def forget(self, request_id: str) -> None:
        """Share nothing of a request whose record is damaged."""
        self._prompts.pop(request_id, None)
        if self._pages is not None:
            self._pages.release(request_id)

    def _share(self, request_id: str, digests: Sequence[bytes]) -> None:
        assert self._pages is not None, "only what may be shared is noted"
        try:
            if digests:
                self._pages.share(request_id, digests)
        except StoreUnavailable as error:  # nobody waits for it
            log.warning("prefix_not_shared", request_id=request_id, reason=str(error))
