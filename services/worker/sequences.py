"""Keeps the KV caches of the sequences that a worker has seen. Knows no queue and no arithmetic.

A cache is only a copy: the rows in the store are the truth, and any worker of the group can read
them. A cache that is behind is topped up from the store; one that is dropped is read again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from services.worker.draft_policy import common_prefix
from services.worker.guesser import Guesser
from shared.errors import KernelError, KvMissing, StoreDamaged
from shared.model.kv_cache import SequenceCache
from shared.model.local_prefixes import LocalPrefixes
from shared.model.logits import LogitsProcessor
from shared.store.kv_pages import KvPages


@dataclass(frozen=True, slots=True)
class Shape:
    """Processors that have seen the generated tokens before `position`, in `epoch`."""

    processors: Sequence[LogitsProcessor]
    epoch: int
    position: int


Key = tuple[int, str]  # (group, request_id)
# Only the last group sees a request end; what the others hold of it goes after this time. A step
# that waits as long behind others is not seen in practice, and its request would end by name.
EMBEDDED_IDLE_S = 600.0
# For rows that are nowhere else: those of a draft, until the next step tells which of them count,
# and those of steps that stay.
DRAFT_GRACE_S = 2.0
# Read at once: what is on its way lies in memory several times.
READ_POSITIONS = 256


@dataclass(slots=True)
class SequenceState:
    """What a worker remembers of one request in one group.

    `forwarded` is the position after the last row whose output the broker has confirmed, in
    `epoch`: a repeat of it may be acked unread, since its effect is already on its way. The last
    rows of the cache may be guesses: those of the tokens `draft`. `guesser` is the last group's; it
    has none before position `quiet_until`, and none of another epoch than `guess_epoch`. `shape`
    is the last group's, too: what changes the logits of the next token. So is `on_record`: the
    position after the last token that this worker put on record before anyone else, in
    `on_record_epoch`. `unstored` is the first row of those that are not in the store yet, since
    their steps stay here; None without any.
    """

    cache: SequenceCache
    epoch: int = 0
    forwarded: int = 0
    last_used_s: float = 0.0
    next_worker: str = ""  # who computes the next group of this request, chosen in next_epoch
    next_epoch: int = 0
    draft: tuple[int, ...] = ()
    guesser: Guesser | None = None
    guess_epoch: int = -1
    quiet_until: int = 0
    shape: Shape | None = None
    on_record: int = 0
    on_record_epoch: int = -1
    unstored: int | None = None

    @property
    def is_all_there_is(self) -> bool:
        """Whether rows of it are nowhere else."""
        return bool(self.draft) or self.unstored is not None

    def keep_known(self, position: int, accepted: Sequence[int]) -> None:
        """Drop the rows of guesses that are not the tokens `accepted`, right before `position`."""
        if not self.draft:
            return
        known = self.cache.num_positions - len(self.draft)
        skipped = known - (position - len(accepted))
        if skipped >= 0:
            known += common_prefix(self.draft, accepted[skipped:])
        self.cache.truncate(known)
        self.draft = ()

    def is_repeat(self, *, epoch: int, end_position: int) -> bool:
        return epoch == self.epoch and end_position <= self.forwarded

    def note_forwarded(self, *, epoch: int, end_position: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.forwarded = epoch, 0
        self.forwarded = max(self.forwarded, end_position)


class SequencePool:
    """An LRU of sequence states under a byte budget, `max_bytes`.

    `kv_pages` None means that nothing outside this process holds the rows (embedded mode): then a
    state lives until `drop` or until it was idle for `EMBEDDED_IDLE_S`, whatever the budget, and
    `prefixes` is what its sequences share.
    """

    def __init__(
        self,
        make_cache: Callable[[int], SequenceCache],
        kv_pages: KvPages | None,
        *,
        max_bytes: int,
        idle_s: float = 60.0,
        prefixes: LocalPrefixes | None = None,
    ) -> None:
        self._make_cache = make_cache
        self._prefixes = prefixes
        self._kv_pages = kv_pages
        self.max_bytes = max_bytes
        self._idle_s = idle_s
        self._states: OrderedDict[Key, SequenceState] = OrderedDict()

    def get(self, group: int, request_id: str, *, now_s: float) -> SequenceState:
        """The state of a request in a group, new and empty if it was never seen or was evicted."""
        key = (group, request_id)
        state = self._states.get(key)
        if state is None:
            state = self._states[key] = SequenceState(self._open_cache(group, request_id))
        self._states.move_to_end(key)
        state.last_used_s = now_s
        return state

    def peek(self, group: int, request_id: str) -> SequenceState | None:
        return self._states.get((group, request_id))

    def top_up(
        self,
        group: int,
        request_id: str,
        position: int,
        *,
        now_s: float,
        accepted: Sequence[int] = (),
    ) -> SequenceState:
        """The state with at least rows 0..position-1 in its cache, none of them a guess.

        `accepted` are the tokens right before `position` that were guesses and proved right.
        Reads only the missing ones. Raises `KvMissing` when the store does not hold them (yet) or
        there is none, `KernelError` when it holds what no cache ever wrote. Shared rows that are
        damaged are dropped for all, and missing.
        """
        state = self.get(group, request_id, now_s=now_s)
        state.keep_known(position, accepted)
        have = state.cache.num_positions
        if have < position:
            if self._kv_pages is None:
                raise KvMissing(
                    f"KV rows {have}..{position - 1} of {request_id} are gone in group {group}"
                )
            try:
                for start in range(have, position, READ_POSITIONS):
                    stop = min(start + READ_POSITIONS, position)
                    rows = self._kv_pages.read(request_id, group, start, stop)
                    state.cache.import_rows(start, rows)
            except (KernelError, StoreDamaged) as error:
                if not self._kv_pages.drop_shared(request_id, group):
                    raise
                # Perhaps its own rows are the damaged ones: all are computed again either way.
                raise KvMissing(f"shared KV rows of {request_id} are dropped: {error}") from error
        return state

    def _open_cache(self, group: int, request_id: str) -> SequenceCache:
        if self._prefixes is None:
            return self._make_cache(group)
        return self._prefixes.open_cache(group, request_id, self._make_cache)

    def drop(self, request_id: str, groups: Iterable[int]) -> None:
        for group in groups:
            self._states.pop((group, request_id), None)

    def drop_group(self, group: int) -> None:
        for key in [key for key in self._states if key[0] == group]:
            del self._states[key]

    def trim(self, *, now_s: float) -> None:
        """Evict idle states, then the least recently used ones until the budget holds."""
        embedded = self._kv_pages is None
        max_bytes = 0 if embedded else self.max_bytes
        idle_s = EMBEDDED_IDLE_S if embedded else self._idle_s
        total = 0 if embedded else self.num_bytes  # without a budget nobody needs to know
        for key in list(self._states):
            state = self._states[key]
            idle_for_s = now_s - state.last_used_s
            if total <= max_bytes and idle_for_s < idle_s:
                break
            if state.is_all_there_is and idle_for_s < DRAFT_GRACE_S:
                continue
            total -= state.cache.nbytes
            del self._states[key]

    def make_room(self, wanted: Sequence[tuple[int, str, int]]) -> None:
        """Evict others, so that the budget holds once these (group, request_id, end position) are
        in the caches; those with rows that are nowhere else only if it must be."""
        if self._kv_pages is None:
            return
        need = 0
        keep = set()
        for group, request_id, end_position in wanted:
            key = (group, request_id)
            cache = self._states[key].cache if key in self._states else self._make_cache(group)
            need += max(cache.nbytes, cache.bytes_for(end_position))
            keep.add(key)
        others = [key for key in self._states if key not in keep]
        need += sum(self._states[key].cache.nbytes for key in others)
        for key in sorted(others, key=lambda key: self._states[key].is_all_there_is):
            if need <= self.max_bytes:
                return
            need -= self._states.pop(key).cache.nbytes

    def num_active(self, *, since_s: float) -> int:
        """How many requests had a turn since then."""
        return sum(state.last_used_s >= since_s for state in self._states.values())

    @property
    def num_bytes(self) -> int:
        return sum(state.cache.nbytes for state in self._states.values())

    def __len__(self) -> int:
        return len(self._states)
