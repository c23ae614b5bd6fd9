"""Runs a scheduler as a process: reads the model, heartbeats, leaves clean."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

import structlog

from services.scheduler.admission import ServedModel
from services.scheduler.limits import SchedulerLimits
from services.scheduler.scheduler import Scheduler
from shared.broker.base import Broker
from shared.errors import StoreUnavailable
from shared.liveness import HEARTBEAT_S, PRESENCE_TTL_MS
from shared.model.config import ModelConfig
from shared.process import rss_bytes
from shared.store.connection import Stores
from shared.store.kv_pages import KvPages
from shared.store.ledger import Ledger
from shared.store.prefix_pages import StoredPrefixes
from shared.store.presence import Presence
from shared.store.presence_types import SchedulerInfo
from shared.store.shards import ShardStore
from shared.text.document import read_text_document
from shared.topology import Layout, check_layout, control_queues, group_queues

log = structlog.get_logger()

IDLE_TURN_S = 0.25


def read_served_model(shards: ShardStore, model: str) -> ServedModel:
    """The active layout of a model ("" means the one activated last), its config and text side.

    Raises `ModelError` when it is not loaded, `ShardError` when its tokenizer is damaged.
    """
    layout: Layout = shards.active_layout(model)
    manifest = shards.get_manifest(layout.model_id).checked()
    check_layout(layout, manifest)
    config = ModelConfig.from_dict(manifest.config)
    document = shards.read_shard(manifest, "tokenizer").tobytes()
    tokenizer, chat_template = read_text_document(document)
    return ServedModel(layout, config, tokenizer, chat_template)


class SchedulerService:
    """One scheduler process. `run` returns when `stopping` is set."""

    def __init__(
        self,
        *,
        model: str,
        broker: Broker,
        stores: Stores,
        stopping: threading.Event,
        limits: SchedulerLimits = SchedulerLimits(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheduler_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
        self._broker = broker
        self._stores = stores
        self._stopping = stopping
        self._limits = limits
        self._clock = clock
        self._served = read_served_model(ShardStore(stores.weights), model)
        self._presence = Presence(stores.meta, ttl_ms=PRESENCE_TTL_MS)
        self._started_unix_ms = time.time_ns() // 1_000_000
        self._next_heartbeat_s = 0.0

    def run(self) -> None:
        """Serve until `stopping` is set. What is in flight goes to the next scheduler."""
        layout = self._served.layout
        self._broker.declare([*control_queues(), *group_queues(layout)])
        scheduler = Scheduler(
            model=self._served,
            broker=self._broker,
            ledger=Ledger.of(self._stores),
            kv_pages=KvPages.of_layout(
                self._stores.kv, layout, self._served.config.kv_row_bytes_per_layer
            ),
            prefix_pages=self._prefix_pages(),
            coverage=lambda: self._presence.coverage(layout),
            peers=lambda: self._presence.workers(layout),
            limits=self._limits,
        )
        log.info("scheduler_ready", scheduler_id=self.scheduler_id, model_id=layout.model_id)
        try:
            while not self._stopping.is_set():
                scheduler.turn(IDLE_TURN_S)
                self._heartbeat_when_due(scheduler)
            scheduler.leave()
        finally:
            self._leave()

    def _prefix_pages(self) -> StoredPrefixes | None:
        max_bytes = self._limits.prefix_budget_bytes
        if max_bytes is None:
            return None
        row_bytes = self._served.config.kv_row_bytes_per_layer
        return StoredPrefixes(self._stores.kv, self._served.layout, row_bytes, max_bytes=max_bytes)

    def _heartbeat_when_due(self, scheduler: Scheduler) -> None:
        now_s = self._clock()
        if now_s < self._next_heartbeat_s:
            return
        self._next_heartbeat_s = now_s + HEARTBEAT_S
        info = SchedulerInfo(
            scheduler_id=self.scheduler_id,
            host=socket.gethostname(),
            pid=os.getpid(),
            rss_bytes=rss_bytes(),
            num_requests=scheduler.num_in_flight,
            num_waiting=scheduler.num_waiting,
            reserved_kv_bytes=scheduler.reserved_kv_bytes,
            num_redrives=scheduler.num_redrives,
            started_unix_ms=self._started_unix_ms,
        )
        try:
            self._presence.scheduler_heartbeat(info)
        except StoreUnavailable as error:
            log.warning("heartbeat_failed", reason=str(error))

    def _leave(self) -> None:
        try:
            self._presence.scheduler_release(self.scheduler_id)
        except StoreUnavailable as error:
            log.warning("release_failed", reason=str(error))
        log.info("scheduler_left", scheduler_id=self.scheduler_id)
