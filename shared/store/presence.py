"""Who is alive, and which worker serves which layer group. Knows no queue and no weights.

A worker's presence is a key that lives as long as it is refreshed; its claim is an entry of one
hash per layout. A claim counts only while the presence lives, and whoever claims next sweeps out
the claims of ghosts. Claims are decided by one script, so that workers that start together spread
evenly. A presence is refreshed by PEXPIRE on its own, which Redis allows even when its memory is
full and the new figures are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from shared.errors import ConfigError, DecodeError, StoreDamaged
from shared.store import keys
from shared.store.connection import Call, Command, Connection, StoreFull
from shared.store.presence_types import SchedulerInfo, WorkerInfo
from shared.store.scripts import load_script
from shared.topology import Layout

log = structlog.get_logger()


class Presence:
    """Workers and schedulers; they vanish `ttl_ms` after their last heartbeat.

    Raises `StoreUnavailable` when the store does not answer.
    """

    def __init__(self, meta: Connection, *, ttl_ms: int = 10_000) -> None:
        self._meta = meta
        self.ttl_ms = ttl_ms

    def claim(
        self,
        layout: Layout,
        info: WorkerInfo,
        group_bytes: Sequence[int],
        wanted: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Make the worker present and give it a group: the least covered one that fits.

        `group_bytes[g]` is what group g takes of `info.memory_bytes` (0: no limit). Ties go to the
        lowest index. `wanted` overrides the choice with groups that the worker insists on, or has
        in memory already. A worker that has a claim keeps it. Raises `ConfigError` for a wanted
        group that does not exist, and when memory is too small.
        """
        _check_fit(layout, info.memory_bytes, group_bytes, wanted)
        return self._run_claim("claim", layout, info, group_bytes, wanted)

    def adopt_uncovered(
        self, layout: Layout, info: WorkerInfo, group_bytes: Sequence[int]
    ) -> tuple[int, ...]:
        """Let a worker with memory to spare take groups that no live worker covers.

        Returns all groups it holds then, so that a repeat gives the same answer; () when its
        presence has expired, and it has to claim first.
        """
        return self._run_claim("adopt", layout, info, group_bytes, ())

    def move(self, layout: Layout, info: WorkerInfo, group_bytes: Sequence[int]) -> tuple[int, ...]:
        """Let a worker all of whose groups others cover too take one that nobody covers, instead.

        Returns the groups it holds then; () when its presence has expired.
        """
        return self._run_claim("move", layout, info, group_bytes, ())

    def give_back(
        self, layout: Layout, info: WorkerInfo, group_bytes: Sequence[int], groups: Sequence[int]
    ) -> tuple[int, ...]:
        """Take those of `groups` from a worker that others cover too; it keeps one of all it has.

        Returns the groups it holds then; () when its presence has expired.
        """
        return self._run_claim("yield", layout, info, group_bytes, groups)

    def request_drain(self, worker_id: str, layout: Layout, *, ttl_ms: int = 60_000) -> None:
        """Ask a worker to finish what it has and leave; it hears with its next heartbeat."""
        key = keys.draining(layout.model_id, layout.layout_id, worker_id)
        self._meta.run(("SET", key, 1, "PX", ttl_ms))

    def is_drain_requested(self, worker_id: str, layout: Layout) -> bool:
        key = keys.draining(layout.model_id, layout.layout_id, worker_id)
        return bool(self._meta.run(("EXISTS", key)) == 1)

    def heartbeat(self, layout: Layout, info: WorkerInfo) -> bool:
        """Refresh a worker's presence. False when it or the claim was gone: then claim again."""
        key = keys.worker(layout.model_id, layout.layout_id, info.worker_id)
        replies = self._meta.run_all(
            [
                ("PEXPIRE", key, self.ttl_ms),
                # XX: never brings back a key that has expired, which then would never expire.
                ("SET", key, info.to_json(), "XX", "KEEPTTL"),
                ("HEXISTS", keys.claims(layout.model_id, layout.layout_id), info.worker_id),
            ],
            keep=(StoreFull, StoreDamaged),
        )
        present, _, claimed = replies
        return bool(present == 1 and claimed == 1)

    def release(self, worker_id: str, layout: Layout) -> None:
        """Give up a worker's claim and presence."""
        self._meta.run_all(
            [
                ("HDEL", keys.claims(layout.model_id, layout.layout_id), worker_id),
                ("DEL", keys.worker(layout.model_id, layout.layout_id, worker_id)),
            ]
        )

    def workers(self, layout: Layout) -> list[WorkerInfo]:
        """The live workers of a layout, by id.

        A garbled entry counts as none, until its worker's next heartbeat writes it again.
        """
        try:
            flat = self._meta.run(("HGETALL", keys.claims(layout.model_id, layout.layout_id)))
        except StoreDamaged as error:
            log.warning("claims_garbled", layout_id=layout.layout_id, reason=str(error))
            return []
        claims = sorted((_id(flat[i]), flat[i + 1]) for i in range(0, len(flat), 2))
        if not claims:
            return []
        texts = self._meta.run(
            ("MGET", *(keys.worker(layout.model_id, layout.layout_id, i) for i, _ in claims))
        )
        found = []
        for (worker_id, claim), text in zip(claims, texts, strict=True):
            if text is None:
                continue
            try:
                groups = _groups(claim, layout.num_groups)
                found.append(replace(WorkerInfo.from_json(text), groups=groups))
            except DecodeError as error:
                log.warning("presence_garbled", worker_id=worker_id, reason=str(error))
        return found

    def coverage(self, layout: Layout) -> list[int]:
        """How many live workers claim each group."""
        counts = [0] * layout.num_groups
        for worker in self.workers(layout):
            for group in worker.groups:
                counts[group] += 1
        return counts

    def scheduler_heartbeat(self, info: SchedulerInfo) -> None:
        """Make a scheduler present, or refresh it."""
        key = keys.scheduler(info.scheduler_id)
        commands: list[Command] = [
            ("PEXPIRE", key, self.ttl_ms),
            ("SET", key, info.to_json(), "PX", self.ttl_ms),
            ("SADD", keys.SCHEDULERS, info.scheduler_id),
        ]
        refreshed, *written = self._meta.run_all(commands, keep=(StoreFull, StoreDamaged))
        if isinstance(written[1], StoreDamaged):  # not a set any more: a new one fills up again
            written[1] = self._meta.run_all([("DEL", keys.SCHEDULERS), commands[2]])
        if not refreshed:
            for reply in written:
                if isinstance(reply, Exception):
                    raise reply

    def scheduler_release(self, scheduler_id: str) -> None:
        """Take a scheduler's presence away."""
        self._meta.run_all(
            [("SREM", keys.SCHEDULERS, scheduler_id), ("DEL", keys.scheduler(scheduler_id))]
        )

    def schedulers(self) -> list[SchedulerInfo]:
        """The live schedulers, by id; forgets those that are gone."""
        try:
            members = self._meta.run(("SMEMBERS", keys.SCHEDULERS))
        except StoreDamaged as error:
            log.warning("schedulers_garbled", reason=str(error))
            return []
        ids = sorted(map(_id, members))
        if not ids:
            return []
        texts = self._meta.run(("MGET", *map(keys.scheduler, ids)))
        alive = dict(zip(ids, texts, strict=True))
        if gone := [scheduler_id for scheduler_id, text in alive.items() if text is None]:
            # One that returns right now adds itself again with its next heartbeat.
            self._meta.run(("SREM", keys.SCHEDULERS, *gone))
        found = []
        for scheduler_id, text in alive.items():
            if text is None:
                continue
            try:
                found.append(SchedulerInfo.from_json(text))
            except DecodeError as error:
                log.warning("presence_garbled", scheduler_id=scheduler_id, reason=str(error))
        return found

    def _run_claim(
        self,
        mode: str,
        layout: Layout,
        info: WorkerInfo,
        group_bytes: Sequence[int],
        wanted: Sequence[int],
    ) -> tuple[int, ...]:
        place = (layout.model_id, layout.layout_id)
        held = self._meta.run(
            Call(
                load_script("presence_claim"),
                (keys.claims(*place), keys.worker(*place, info.worker_id)),
                (
                    mode,
                    info.worker_id,
                    keys.worker(*place, ""),
                    self.ttl_ms,
                    info.to_json(),
                    info.memory_bytes,
                    ",".join(map(str, sorted(wanted))),
                    *group_bytes,
                ),
            )
        )
        return _groups(held, layout.num_groups)


def _id(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")  # one that is not UTF-8 is garbage, and has no presence


def _groups(raw: bytes, num_groups: int) -> tuple[int, ...]:
    parts = [part for part in raw.split(b",") if part]
    if not all(part.isdigit() and int(part) < num_groups for part in parts):
        raise DecodeError(f"claim {raw!r:.80} is no list of groups in 0..{num_groups - 1}")
    return tuple(sorted({int(part) for part in parts}))


def _check_fit(
    layout: Layout, memory_bytes: int, group_bytes: Sequence[int], wanted: Sequence[int]
) -> None:
    if len(group_bytes) != layout.num_groups:
        raise ValueError(f"{len(group_bytes)} sizes for {layout.num_groups} groups")
    for group in wanted:
        if not 0 <= group < layout.num_groups:
            raise ConfigError(
                f"--group must be in 0..{layout.last_group} for layout {layout.layout_id}, "
                f"got {group}"
            )
    need = sum(group_bytes[group] for group in wanted) if wanted else min(group_bytes)
    if memory_bytes and need > memory_bytes:
        what = f"groups {sorted(wanted)}" if wanted else "the smallest group"
        raise ConfigError(
            f"--memory is {memory_bytes} bytes and {what} of layout {layout.layout_id} "
            f"takes {need}",
            remedy="allow more memory, or cut the model into more groups: "
            "cellpipe load MODEL --groups N",
        )
