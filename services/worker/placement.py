"""Which layer groups a worker holds: claims, adopts, moves and gives back. Knows no queue.

Every change is decided by one script in the store, so that two workers never leave a group to each
other or both take it. What the script says is done here afterwards: load, serve, drop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import structlog

from shared.config import enough_text, size_text
from shared.errors import CellpipeError, ConfigError, TransientError
from shared.liveness import ADOPT_AFTER_S
from shared.model.layer_group import LayerGroup
from shared.store.presence import Presence
from shared.store.presence_types import WorkerInfo, WorkerState
from shared.topology import WORKER_BASE_BYTES, Layout

log = structlog.get_logger()

# What cannot be loaded is not asked for again before this: its shards must be stored anew first.
LOAD_AGAIN_AFTER_S = 30.0


class Serving(Protocol):
    """The worker as this module sees it."""

    @property
    def groups(self) -> tuple[int, ...]: ...

    def serve_group(self, group: int, layer_group: LayerGroup) -> None: ...

    def drop_group(self, group: int) -> None: ...


def check_memory(
    memory_bytes: int, layout: Layout, group_bytes: Sequence[int], wanted: Sequence[int]
) -> None:
    """Raise `ConfigError` when a process of so much memory cannot hold the wanted groups, or, with
    none wanted, any group. Says what would be enough; whether a group exists, the claim says."""
    if not all(0 <= group < layout.num_groups for group in wanted):
        return
    smallest = min(range(layout.num_groups), key=group_bytes.__getitem__)
    groups = sorted(set(wanted)) or [smallest]
    shard_bytes = sum(group_bytes[group] for group in groups)
    need_bytes = shard_bytes + WORKER_BASE_BYTES
    if memory_bytes >= need_bytes:
        return
    named = ", ".join(map(str, groups))
    what = f"group {named}" if len(groups) == 1 else f"groups {named}"
    if not wanted and layout.num_groups > 1:
        what = f"the smallest group ({named})"
    enough = enough_text(need_bytes)
    options = "".join(f" --group {group}" for group in groups) if wanted else ""
    more_groups = ""
    if memory_bytes > WORKER_BASE_BYTES and layout.num_groups < layout.bounds[-1][1]:
        more_groups = ", or cut the model into more groups: cellpipe load MODEL --groups N"
    raise ConfigError(
        f"--memory is {size_text(memory_bytes)}, and {what} of layout {layout.layout_id} needs "
        f"{enough}: {enough_text(shard_bytes)} of shards, "
        f"{enough_text(WORKER_BASE_BYTES)} for the process itself",
        remedy=f"cellpipe worker{options} --memory {enough}{more_groups}",
    )


class Placement:
    """The groups of one worker. Raises `StoreUnavailable`.

    A group that cannot be loaded is left to others, and those that the worker has are served on;
    only a worker that has no other raises the `CellpipeError`.
    """

    def __init__(
        self,
        presence: Presence,
        layout: Layout,
        group_bytes: Sequence[int],
        *,
        claimant: Callable[[], WorkerInfo],
        load: Callable[[int], LayerGroup],
    ) -> None:
        self._presence = presence
        self._layout = layout
        self._group_bytes = group_bytes
        self._claimant = claimant
        self._load = load
        self._since_s: dict[tuple[str, int], float] = {}
        self._adopt_from_s = -math.inf

    def claim(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Become present with these groups, or with the least covered one that fits."""
        return self._presence.claim(self._layout, self._claimant(), self._group_bytes, wanted)

    def balance(self, worker: Serving, now_s: float) -> None:
        """Take what nobody serves, and leave what others serve, once it has been so for a while."""
        claimed, served = self._others()
        uncovered = [g for g, n in enumerate(claimed) if n == 0 and g not in worker.groups]
        shared = [g for g in worker.groups if served[g] > 0]
        names = [*(("uncovered", g) for g in uncovered), *(("shared", g) for g in shared)]
        self._since_s = {name: self._since_s.get(name, now_s) for name in names}
        lasting = {name for name in names if now_s - self._since_s[name] >= ADOPT_AFTER_S}
        place = (self._layout, self._claimant(), self._group_bytes)
        if any(("uncovered", g) in lasting for g in uncovered) and now_s >= self._adopt_from_s:
            self._apply(worker, self._presence.adopt_uncovered(*place), now_s)
            if shared == list(worker.groups):  # there was no room, and others have all of it
                self._apply(worker, self._presence.move(*place), now_s)
        elif len(worker.groups) > 1 and (spare := [g for g in shared if ("shared", g) in lasting]):
            self._apply(worker, self._presence.give_back(*place, spare), now_s)

    def _others(self) -> tuple[list[int], list[int]]:
        """How many other workers claim each group, and how many serve it already."""
        own_id = self._claimant().worker_id
        claimed, served = [0] * self._layout.num_groups, [0] * self._layout.num_groups
        for info in self._presence.workers(self._layout):
            if info.worker_id == own_id or info.state is WorkerState.DRAINING:
                continue
            for group in info.groups:
                claimed[group] += 1
                served[group] += info.state is WorkerState.SERVING
        return claimed, served

    def _apply(self, worker: Serving, held: Sequence[int], now_s: float) -> None:
        if not held:
            return  # the presence expired: the next heartbeat claims again
        for group in worker.groups:
            if group not in held:
                worker.drop_group(group)
                log.info("group_given_back", group=group)
        for group in held:
            if group not in worker.groups:
                try:
                    worker.serve_group(group, self._load(group))
                except TransientError:
                    raise  # its claim stays, and the next turn tries again
                except CellpipeError as error:
                    log.error("group_not_loaded", group=group, reason=str(error))
                    if not worker.groups:
                        raise
                    self._adopt_from_s = now_s + LOAD_AGAIN_AFTER_S
                    self.claim(worker.groups)
                    return
