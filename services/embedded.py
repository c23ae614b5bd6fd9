"""The whole pipeline in one process: no servers, the same code of scheduler and worker.

Only wires. The broker is a `MemoryHub`, the ledger a `MemoryLedger`, and each service runs its turn
on a thread of its own. Nothing outlives the process, so with one worker a group KV rows stay in it,
and so do those that requests share; several of a group share theirs through fakeredis.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from services.scheduler.admission import ServedModel
from services.scheduler.scheduler import Scheduler
from services.worker.limits import WorkerLimits
from services.worker.shaping import processors_with
from services.worker.worker import Worker
from shared.broker.memory import MemoryBroker, MemoryHub
from shared.errors import BrokerUnavailable
from shared.kernel.weights import KernelBackend
from shared.manifest import Manifest
from shared.model.config import ModelConfig
from shared.model.layer_group import LayerGroup, ReadShard
from shared.model.local_prefixes import LocalPrefixes
from shared.producer import Producer
from shared.store.connection import Stores, connect
from shared.store.kv_pages import KvPages
from shared.store.memory_ledger import MemoryLedger
from shared.store.prefix_pages import StoredPrefixes
from shared.text.constraint import Grammars
from shared.text.document import read_text_document
from shared.topology import Layout, Wire, control_queues, even_layout, group_queues

TURN_S = 0.5
# Who reads shares the cores with the kernel: reading each token alone cost 0.4 ms of it more.
GATHER_S = 0.02
PREFIX_BYTES = 256 << 20


class Engine:
    """A running pipeline over a packed model; a context manager.

    `producer` submits requests and follows them, `tokenizer` turns their tokens into text,
    `workers` compute them, `ledger` remembers them. Raises `ConfigError` for a number of groups
    that the model cannot be cut into.
    """

    def __init__(
        self,
        manifest: Manifest,
        read_shard: ReadShard,
        backend: KernelBackend,
        *,
        num_groups: int = 1,
        workers_per_group: int = 1,
        wire: Wire = Wire.F32,
        limits: WorkerLimits = WorkerLimits(),
        prefix_bytes: int | None = PREFIX_BYTES,
    ) -> None:
        config = ModelConfig.from_dict(manifest.config)
        layout = even_layout(manifest.model_id, config.num_hidden_layers, num_groups, wire=wire)
        tokenizer, chat_template = read_text_document(bytes(read_shard("tokenizer")))
        self.model_id = manifest.model_id
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.config = config
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._brokers: list[MemoryBroker] = []
        self._hub = MemoryHub()
        self.workers: list[Worker] = []
        self.ledger = ledger = MemoryLedger()
        self._stores: Stores | None = None
        kv_pages: KvPages | None = None
        # A next turn of a conversation computes only what is new in it.
        local_prefixes: LocalPrefixes | None = None
        stored_prefixes: StoredPrefixes | None = None
        if workers_per_group > 1:
            # They share rows through a store; one alone is their only reader.
            self._stores = connect("memory://")
            store, row_bytes = self._stores.kv, config.kv_row_bytes_per_layer
            kv_pages = KvPages.of_layout(store, layout, row_bytes)
            if prefix_bytes is not None:
                stored_prefixes = StoredPrefixes(store, layout, row_bytes, max_bytes=prefix_bytes)
        elif prefix_bytes is not None:
            local_prefixes = LocalPrefixes(num_groups, max_bytes=prefix_bytes)
        front = self._broker()
        front.declare([*control_queues(), *group_queues(layout)])
        self.producer = Producer(
            front,
            ledger,
            tokenizer=tokenizer,
            pause=lambda request_id: ledger.pause(request_id, GATHER_S),
        )
        scheduler = Scheduler(
            model=ServedModel(layout, config, tokenizer, chat_template),
            broker=self._broker(),
            ledger=ledger,
            kv_pages=kv_pages,
            prefix_pages=local_prefixes or stored_prefixes,
            coverage=lambda: [workers_per_group] * num_groups,
        )
        turns: list[Callable[[float], object]] = [scheduler.turn]
        for group in range(num_groups):
            for _ in range(workers_per_group):
                worker = Worker(
                    layout=layout,
                    config=config,
                    layer_groups={group: load_group(manifest, layout, group, read_shard, backend)},
                    broker=self._broker(),
                    ledger=ledger,
                    kv_pages=kv_pages,
                    prefixes=local_prefixes,
                    limits=limits,
                    make_processors=processors_with(
                        Grammars(lambda: tokenizer.token_table, config.eos_token_ids)
                    ),
                )
                self.workers.append(worker)
                turns.append(worker.turn)
        self._threads = [
            threading.Thread(target=self._run, args=(turn,), name=f"cellpipe-{i}", daemon=True)
            for i, turn in enumerate(turns)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_alive(self) -> bool:
        """No thread has died."""
        return self._failure is None

    def check(self) -> None:
        """Raise what a thread died of, if one did."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop the threads; they end with their current turn."""
        self._stopping.set()
        for broker in self._brokers:
            broker.close()
        for thread in self._threads:
            thread.join()
        if self._stores is not None:
            self._stores.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        self.check()

    def _broker(self) -> MemoryBroker:
        broker = MemoryBroker(self._hub)
        self._brokers.append(broker)
        return broker

    def _run(self, turn: Callable[[float], object]) -> None:
        try:
            while not self._stopping.is_set():
                turn(TURN_S)
        except BrokerUnavailable:
            if not self._stopping.is_set():
                raise
        except BaseException as error:
            self._failure = error
            raise


def load_group(
    manifest: Manifest,
    layout: Layout,
    group: int,
    read_shard: ReadShard,
    backend: KernelBackend,
) -> LayerGroup:
    """A group of a layout, with its own ends alone. Raises what `LayerGroup.load` does."""
    first, end = layout.bounds[group]
    return LayerGroup.load(
        ModelConfig.from_dict(manifest.config),
        manifest,
        first,
        end,
        read_shard,
        first=group == 0,
        last=group == layout.last_group,
        backend=backend,
    )
