"""Runs a worker as a process: loads shards, heartbeats, takes breaks, leaves clean.

Knows what a process is (pid, memory, signals); the turn itself is `worker.py`, which groups it
holds `placement.py`. Longer than other modules: what a process is, is told in one place.
"""

from __future__ import annotations

import gc
import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import structlog

from services.worker.faults import Faults
from services.worker.limits import GRAMMAR_BYTES, MIN_KV_CACHE_BYTES, WorkerLimits
from services.worker.placement import Placement, check_memory
from services.worker.shaping import processors_with
from services.worker.watchdog import Watchdog
from services.worker.worker import Membership, Worker
from shared.broker.base import Broker
from shared.errors import StoreUnavailable
from shared.kernel.weights import KernelBackend
from shared.liveness import HEARTBEAT_S, PRESENCE_TTL_MS
from shared.manifest import Manifest, ShardKind
from shared.model.config import ModelConfig
from shared.model.layer_group import LayerGroup
from shared.process import peak_rss_bytes, rss_bytes
from shared.store.attempts import Attempts
from shared.store.connection import Stores
from shared.store.kv_pages import KvPages
from shared.store.ledger import Ledger
from shared.store.presence import Presence
from shared.store.presence_types import WorkerInfo, WorkerState
from shared.store.shards import ShardStore
from shared.text.constraint import Grammars
from shared.text.token_bytes import TokenTable, read_token_table
from shared.topology import (
    WORKER_BASE_BYTES,
    Layout,
    check_layout,
    control_queues,
    group_bytes,
    group_queues,
    group_shards,
)

log = structlog.get_logger()

IDLE_TURN_S = 0.25
# After others were told of a drain, until they have read it: what they send meanwhile is taken.
DRAIN_NOTICE_S = 1.5
# Of what weights and base leave. The rest is lost between pages that come and go: at 1.0, 24
# requests of up to 2,000 tokens brought a worker of 256 MiB to 265 MB.
ROWS_SHARE = 0.85


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the user asked of a worker. `memory_bytes` is for the process in all.

    `groups` are served and no others; with none, the worker chooses, and adopts what nobody serves.
    """

    model: str = ""
    groups: tuple[int, ...] = ()
    memory_bytes: int = 256 << 20
    limits: WorkerLimits = WorkerLimits()
    presence_ttl_ms: int = PRESENCE_TTL_MS
    hang_limit_s: float = 30.0
    grace_s: float = 3.0  # for what was received when it is told to leave


class WorkerService:
    """One worker process. `run` returns when `stopping` is set; it raises for what stops a start.

    Raises `ModelError` when no such model is loaded, `ShardError` for a corrupt shard,
    `ConfigError` for a group that does not exist or does not fit, `StoreUnavailable`.
    """

    def __init__(
        self,
        options: WorkerOptions,
        *,
        broker: Broker,
        stores: Stores,
        backend: KernelBackend,
        stopping: threading.Event,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker_id = new_worker_id()
        self._options = options
        self._weight_budget_bytes = options.memory_bytes - WORKER_BASE_BYTES
        self._broker = broker
        self._backend = backend
        self._stopping = stopping
        self._faults = faults
        self._clock = clock
        self._shards = ShardStore(stores.weights)
        self._presence = Presence(stores.meta, ttl_ms=options.presence_ttl_ms)
        self._layout: Layout = self._shards.active_layout(options.model)
        self._manifest: Manifest = self._shards.get_manifest(self._layout.model_id).checked()
        check_layout(self._layout, self._manifest)
        self._config = ModelConfig.from_dict(self._manifest.config)
        self._group_bytes = [
            group_bytes(self._manifest, self._layout, group)
            for group in range(self._layout.num_groups)
        ]
        check_memory(options.memory_bytes, self._layout, self._group_bytes, options.groups)
        self._ledger = Ledger.of(stores)
        self._attempts = Attempts(stores.meta)
        self._kv_pages = KvPages.of_layout(
            stores.kv, self._layout, self._config.kv_row_bytes_per_layer
        )
        self._started_unix_ms = time.time_ns() // 1_000_000
        self._next_heartbeat_s = 0.0
        self._state = WorkerState.LOADING
        self._reason = ""
        self._resume_at_s = 0.0
        self._worker: Worker | None = None
        self._has_grammars = False
        self._shared_shards: dict[str, npt.NDArray[np.uint8]] = {}
        self._watchdog = Watchdog(options.hang_limit_s)
        self._placement = Placement(
            self._presence,
            self._layout,
            self._group_bytes,
            claimant=self._claimant,
            load=self._load,
        )

    def run(self) -> None:
        """Claim, load, serve until `stopping` is set, then leave clean."""
        self._broker.declare([*control_queues(), *group_queues(self._layout)])
        groups = self._placement.claim(self._options.groups)
        self._watchdog.start()
        try:
            worker = self._worker = Worker(
                layout=self._layout,
                config=self._config,
                layer_groups={group: self._load(group) for group in groups},
                broker=self._broker,
                ledger=self._ledger,
                kv_pages=self._kv_pages,
                membership=Membership(
                    self.worker_id,
                    lambda: self._presence.workers(self._layout),
                    self._attempts,
                    peers_ttl_s=self._options.presence_ttl_ms / 1000,
                ),
                limits=self._limits_beside(groups),
                faults=self._faults,
                watchdog=self._watchdog,
                make_processors=processors_with(
                    Grammars(self._read_token_table, self._config.eos_token_ids)
                ),
            )
            self._state = WorkerState.SERVING
            log.info(
                "worker_ready",
                worker_id=self.worker_id,
                groups=groups,
                shard_bytes=self._shard_bytes(),
                rss_bytes=rss_bytes(),
            )
            gc.collect()
            gc.freeze()  # what lives for ever: for 78,000 objects a full collection took 27 ms
            self._serve(worker)
            self._drain(worker)
        finally:
            self._leave()

    def _read_token_table(self) -> TokenTable:
        """What the first answer with a form needs, in memory that was the KV cache's."""
        raw = self._shards.read_shard(self._manifest, "tokenizer").tobytes()
        if not self._has_grammars:
            assert self._worker is not None, "it asks"
            self._worker.reserve(GRAMMAR_BYTES)
            self._has_grammars = True
        return read_token_table(raw)

    def _serve(self, worker: Worker) -> None:
        """Until the process is told to stop, or the worker to drain."""
        leave_at_s = math.inf
        while not self._stopping.is_set() and self._clock() < leave_at_s:
            worker.turn(IDLE_TURN_S)
            if worker.quarantine.is_due:
                self._take_break(worker)
            if self._heartbeat_when_due(worker) and leave_at_s == math.inf:
                leave_at_s = self._clock() + DRAIN_NOTICE_S

    def _drain(self, worker: Worker) -> None:
        """Work off what was received, within the grace, and give back the rest."""
        self._state = WorkerState.DRAINING
        self._heartbeat_quietly()
        worker.stop_consuming()
        give_up_at_s = self._clock() + self._options.grace_s
        while worker.num_pending and self._clock() < give_up_at_s:
            worker.turn(IDLE_TURN_S)
            self._heartbeat_when_due(worker)
        worker.hand_back_all()

    def _take_break(self, worker: Worker) -> None:
        break_s = worker.quarantine.begin()
        worker.hand_back_all()
        self._state = WorkerState.QUARANTINED
        self._reason = "it could not compute steps of several requests in a row"
        self._resume_at_s = self._clock() + break_s
        log.error("worker_quarantined", worker_id=self.worker_id, break_s=break_s)
        self._heartbeat_quietly()

    def _end_break_when_due(self, worker: Worker, now_s: float) -> None:
        if self._state is WorkerState.QUARANTINED and now_s >= self._resume_at_s:
            self._state, self._reason = WorkerState.SERVING, ""
            worker.resume()

    def _load(self, group: int) -> LayerGroup:
        started_s = self._clock()
        first, end = self._layout.bounds[group]

        def read(name: str) -> npt.NDArray[np.uint8]:
            if name in self._shared_shards:
                return self._shared_shards[name]
            shard = self._shards.read_shard(self._manifest, name)
            self._heartbeat()  # loading is progress, and may outlast the presence
            if self._manifest.shard(name).kind in (ShardKind.EMBEDDING, ShardKind.ROPE):
                self._shared_shards[name] = shard  # another group here may need it too
            return shard

        layer_group = LayerGroup.load(
            self._config,
            self._manifest,
            first,
            end,
            read,
            first=group == 0,
            last=group == self._layout.last_group,
            backend=self._backend,
        )
        log.info(
            "group_loaded",
            group=group,
            layers=f"{first}..{end - 1}",
            shard_bytes=self._group_bytes[group],
            duration_ms=round((self._clock() - started_s) * 1e3),
        )
        return layer_group

    def _heartbeat_when_due(self, worker: Worker) -> bool:
        """Refresh presence from the compute loop itself: it proves progress, not just life.

        Returns whether somebody asked the worker to drain.
        """
        now_s = self._clock()
        if now_s < self._next_heartbeat_s:
            return False
        self._next_heartbeat_s = now_s + HEARTBEAT_S
        self._end_break_when_due(worker, now_s)
        try:
            if not self._heartbeat():
                log.warning("presence_expired", worker_id=self.worker_id)
                self._placement.claim(worker.groups)
            if self._presence.is_drain_requested(self.worker_id, self._layout):
                if self._state is not WorkerState.DRAINING:
                    self._state, self._reason = WorkerState.DRAINING, "it was asked to"
                    self._heartbeat()
                return True
            if not self._options.groups and self._state is WorkerState.SERVING:
                self._placement.balance(worker, now_s)
        except StoreUnavailable as error:
            log.warning("heartbeat_failed", reason=str(error))
        return False

    def _heartbeat_quietly(self) -> None:
        try:
            self._heartbeat()
        except StoreUnavailable as error:
            log.warning("heartbeat_failed", reason=str(error))

    def _heartbeat(self) -> bool:
        return self._presence.heartbeat(self._layout, self._info())

    def _leave(self) -> None:
        try:
            self._presence.release(self.worker_id, self._layout)
        except StoreUnavailable as error:
            log.warning("release_failed", reason=str(error))
        log.info("worker_left", worker_id=self.worker_id, steps=self._num_steps())

    def _claimant(self) -> WorkerInfo:
        """This worker as a claim sees it: its memory is what it has for weights."""
        return replace(self._info(), memory_bytes=self._weight_budget_bytes)

    def _limits_beside(self, groups: Sequence[int]) -> WorkerLimits:
        """The limits, with the KV cache cut to what these groups' weights leave of the memory."""
        limits = self._options.limits
        left_bytes = self._weight_budget_bytes - sum(self._group_bytes[g] for g in groups)
        for_rows_bytes = round(left_bytes * ROWS_SHARE)
        kv_cache_bytes = max(MIN_KV_CACHE_BYTES, min(limits.kv_cache_bytes, for_rows_bytes))
        return replace(limits, kv_cache_bytes=kv_cache_bytes)

    def _info(self) -> WorkerInfo:
        worker = self._worker
        return WorkerInfo(
            worker_id=self.worker_id,
            groups=worker.groups if worker else (),
            state=self._state,
            host=socket.gethostname(),
            pid=os.getpid(),
            rss_bytes=rss_bytes(),
            peak_rss_bytes=peak_rss_bytes(),
            shard_bytes=self._shard_bytes(),
            memory_bytes=self._options.memory_bytes,
            num_steps=self._num_steps(),
            last_step_unix_ms=worker.last_step_unix_ms if worker else 0,
            started_unix_ms=self._started_unix_ms,
            num_pending=worker.num_waiting if worker else 0,
            num_active=worker.num_active() if worker else 0,
            num_failures=worker.quarantine.num_failures if worker else 0,
            turn_us=round(worker.turn_s * 1e6) if worker else 0,
            reason=self._reason,
            num_decode_steps=worker.stages.num_steps if worker else 0,
            num_decode_turns=worker.stages.num_turns if worker else 0,
            stage_us=worker.stages.totals_us() if worker else (),
            told_unix_ms=time.time_ns() // 1_000_000,
            kv_cache_bytes=worker.kv_cache_bytes if worker else 0,
        )

    def _num_steps(self) -> int:
        return self._worker.num_steps_done if self._worker else 0

    def _shard_bytes(self) -> int:
        """Bytes of the shards in memory, each counted once however many groups share it."""
        if self._worker is None:
            return 0
        names = {
            name
            for group in self._worker.groups
            for name in group_shards(self._layout, group, tied=self._config.tie_word_embeddings)
        }
        return sum(self._manifest.shard(name).num_bytes for name in names)


def new_worker_id() -> str:
    """A name that no other process has had: it is part of queue names and of routes."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{secrets.token_hex(2)}"
