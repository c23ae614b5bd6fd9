"""A pipeline whose turns a test calls one by one: no thread, no socket, no sleep.

Everything is real (memory broker, fakeredis store, kernel, tiny random model) but the clock, which
only the rig moves. What goes wrong is made by `tests/faults.py`, handed to the part it concerns.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.scheduler.admission import Plan, ServedModel, first_step
from services.scheduler.limits import SchedulerLimits
from services.scheduler.records import record_of
from services.scheduler.scheduler import Scheduler
from services.worker.limits import WorkerLimits
from services.worker.shaping import processors_with
from services.worker.worker import Membership, Worker
from shared import codec
from shared.broker.base import Broker, Delivery, Outgoing
from shared.broker.memory import MemoryBroker, MemoryHub
from shared.messages import Reply, Request, SamplingParams, Step
from shared.model.layer_group import LayerGroup
from shared.model.local_prefixes import LocalPrefixes
from shared.store.attempts import Attempts
from shared.store.connection import connect
from shared.store.kv_pages import KvPages
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent, LedgerRecord
from shared.store.prefix_pages import StoredPrefixes
from shared.store.presence_types import WorkerInfo, WorkerState
from shared.text.chat_template import ChatTemplate
from shared.text.constraint import Grammars
from shared.topology import (
    DEAD_QUEUE,
    REQUESTS_QUEUE,
    QueueSpec,
    Wire,
    control_queues,
    even_layout,
    group_queue,
    group_queues,
    is_inbox,
)
from tests.faults import Crash
from tests.gguf_files import CHAT_TEMPLATE
from tests.rig_model import (
    GREEDY,
    expected_tokens,
    load_group,
    rig_layer_group,
    rig_model,
    rig_tokenizer,
)
from tests.tiny_model import TinyModel

PEERS_TTL_S = 5.0
TURN_COST_S = 0.01  # what the clock moves on after everything had a turn
MAX_ROUNDS = 3_000


class FakeClock:
    """Seconds that pass when a test says so. `sleep` passes them too, so back-offs cost nothing."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Rig:
    """Queues, stores and a layout of `num_groups`; workers and schedulers are added by tests.

    `embedded`: rows stay in their worker, as in the pipeline of one process. `prefix_bytes` None is
    `--no-prefix-cache`. `model` is the tiny one of all tests unless another is given.
    """

    def __init__(
        self,
        num_groups: int = 2,
        *,
        limits: WorkerLimits = WorkerLimits(),
        embedded: bool = False,
        prefix_bytes: int | None = 256 << 20,
        wire: Wire = Wire.F32,
        model: TinyModel | None = None,
    ) -> None:
        self._model = model
        model = model or rig_model()
        self.config = model.config
        self.layout = even_layout(
            model.manifest.model_id, model.config.num_hidden_layers, num_groups, wire=wire
        )
        self.clock = FakeClock()
        self.hub = MemoryHub(self.clock)
        self.stores = connect("memory://")
        self.ledger = Ledger(self.stores.meta)
        self.kv_pages = KvPages.of_layout(
            self.stores.kv, self.layout, self.config.kv_row_bytes_per_layer
        )
        self.prefixes = StoredPrefixes(
            self.stores.kv,
            self.layout,
            self.config.kv_row_bytes_per_layer,
            max_bytes=prefix_bytes or 0,
        )
        self.local_prefixes = LocalPrefixes(num_groups, max_bytes=prefix_bytes or 0)
        self._has_prefixes = prefix_bytes is not None
        self.front = self.new_broker()
        self.front.declare([*control_queues(), *group_queues(self.layout)])
        self.limits = limits
        self.attempts = Attempts(self.stores.meta)
        self._died_at_s: dict[str, float] = {}
        self.peers: dict[str, WorkerInfo] = {}  # what presence would say
        self._embedded = embedded
        self._num_workers = 0
        self._shared_pages = None if embedded else self.kv_pages
        self.num_crashes = 0
        self.coverage = [1] * num_groups
        self._actors: dict[Any, Broker] = {}
        self._taps: dict[str, MemoryBroker] = {}

    @property
    def actors(self) -> list[Any]:
        """The workers and schedulers that live."""
        return list(self._actors)

    def new_broker(self) -> MemoryBroker:
        return MemoryBroker(self.hub)

    def layer_group(self, group: int) -> LayerGroup:
        if self._model is not None:
            return load_group(self._model, self.layout, group)
        return rig_layer_group(self.layout.num_groups, group)

    def add_worker(
        self,
        *groups: int,
        broker: Any = None,
        ledger: Any = None,
        kv_pages: Any = None,
        limits: WorkerLimits | None = None,
        layer_groups: dict[int, Any] | None = None,
        faults: Any = None,
        worker_id: str | None = None,
        make_processors: Any = None,
    ) -> Worker:
        """A worker of `groups`; each of its parts may be replaced by one that fails."""
        broker = broker or self.new_broker()
        self._num_workers += 1
        worker_id = worker_id or f"w{self._num_workers}"
        all_groups = tuple(sorted({*groups, *(layer_groups or {})}))
        self.peers[worker_id] = WorkerInfo(worker_id, all_groups, WorkerState.SERVING)
        membership = Membership(worker_id, self.read_peers, self.attempts, PEERS_TTL_S)
        worker = Worker(
            layout=self.layout,
            config=self.config,
            layer_groups={group: self.layer_group(group) for group in groups}
            | (layer_groups or {}),
            broker=broker,
            ledger=ledger or self.ledger,
            kv_pages=kv_pages or self._shared_pages,
            prefixes=self.local_prefixes if self._embedded else None,
            membership=None if self._embedded else membership,
            limits=limits or self.limits,
            faults=faults,
            make_processors=make_processors
            or processors_with(
                Grammars(lambda: rig_tokenizer().token_table, self.config.eos_token_ids)
            ),
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self._actors[worker] = broker
        return worker

    def add_workers(self, per_group: int = 1) -> list[Worker]:
        """The same number of workers for every group, each with a group of its own."""
        return [
            self.add_worker(group)
            for group in range(self.layout.num_groups)
            for _ in range(per_group)
        ]

    def add_scheduler(
        self,
        *,
        broker: Any = None,
        ledger: Any = None,
        kv_pages: Any = None,
        prefix_pages: Any = None,
        draw_seed: Callable[[str], int] = lambda _: 99,
        limits: SchedulerLimits = SchedulerLimits(),
        peers: Callable[[], Sequence[WorkerInfo]] | None = None,
    ) -> Scheduler:
        broker = broker or self.new_broker()
        scheduler = Scheduler(
            model=ServedModel(
                self.layout, self.config, rig_tokenizer(), ChatTemplate(CHAT_TEMPLATE)
            ),
            broker=broker,
            ledger=ledger or self.ledger,
            kv_pages=kv_pages or self._shared_pages,
            prefix_pages=prefix_pages or self._prefix_pages(),
            coverage=lambda: self.coverage,
            peers=peers or self.read_peers,
            draw_seed=draw_seed,
            limits=limits,
            clock=self.clock,
            sleep=self.clock.sleep,
            rng=random.Random(len(self._actors)),
        )
        self._actors[scheduler] = broker
        return scheduler

    def _prefix_pages(self) -> Any:
        if not self._has_prefixes:
            return None
        return self.local_prefixes if self._embedded else self.prefixes

    def kill(self, actor: Worker | Scheduler) -> None:
        """As `kill -9` does: its connection closes, what it had not settled goes back."""
        self._actors.pop(actor).close()
        if isinstance(actor, Worker):
            self._died_at_s[actor.worker_id] = self.clock()

    def read_peers(self) -> list[WorkerInfo]:
        """What presence tells: of the dead for a while."""
        for worker_id, died_at_s in list(self._died_at_s.items()):
            if self.clock() > died_at_s + PEERS_TTL_S:
                del self._died_at_s[worker_id]
                self.peers.pop(worker_id, None)
        return list(self.peers.values())

    def freeze(self, worker: Worker) -> tuple[Worker, Broker]:
        """As SIGSTOP does: it has no turns, but its connection stays."""
        return worker, self._actors.pop(worker)

    def thaw(self, frozen: tuple[Worker, Broker]) -> None:
        self._actors[frozen[0]] = frozen[1]

    # time

    def turn(self) -> None:
        """Give everyone a turn; whoever crashes in it is dead. Then a little time passes."""
        for actor in list(self._actors):
            try:
                actor.turn(0.0)
            except Crash:
                self.num_crashes += 1
                self.kill(actor)
        self.clock.sleep(TURN_COST_S)

    def run_until(self, holds: Callable[[], bool]) -> None:
        for _ in range(MAX_ROUNDS):
            if holds():
                return
            self.turn()
        raise AssertionError(f"nothing more happens; queued: {self.queued()}")

    def run_until_done(self, *request_ids: str) -> None:
        """Until each of the requests has ended."""
        self.run_until(lambda: all(self.record(i).finish_reason for i in request_ids))

    def run_until_quiet(self) -> None:
        """Until no step and no request is left anywhere."""
        self.run_until(lambda: self.num_steps() == 0 and self.num_messages(REQUESTS_QUEUE) == 0)

    # requests

    def start(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        **changes: Any,
    ) -> Step:
        """Do what the scheduler does: write the record, publish the first step. Returns it."""
        plan = self.admit(request_id, prompt, sampling, **changes)
        step = first_step(plan, self.layout, epoch=0)
        self.publish_step(step)
        return step

    def admit(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        **changes: Any,
    ) -> Plan:
        values: dict[str, Any] = {
            "request_id": request_id,
            "token_ids": tuple(prompt),
            "sampling": sampling,
            "max_position": len(prompt) + sampling.max_tokens - 1,
            "stop_token_ids": self.config.eos_token_ids,
            "deadline_unix_ms": 0,
        }
        plan = Plan(**(values | changes))
        assert self.ledger.admit(record_of(plan, self.layout, created_unix_ms=1))
        return plan

    def publish_step(self, step: Step) -> None:
        self.publish(self.queue(step.group), codec.encode(step))

    def publish(self, queue: str, body: bytes, **changes: Any) -> None:
        self.front.publish([Outgoing(queue, body, **changes)]).wait(0.0)

    def submit(self, request: Request, **changes: Any) -> None:
        """As a producer does; `changes` are those of `Outgoing`."""
        self.publish(REQUESTS_QUEUE, codec.encode(request), **changes)

    # what can be seen from outside

    def queue(self, group: int) -> str:
        return group_queue(self.layout.model_id, self.layout.layout_id, group)

    def record(self, request_id: str) -> LedgerRecord:
        record = self.ledger.get(request_id)
        assert record is not None, f"{request_id} is not in the ledger"
        return record

    def tokens(self, request_id: str) -> list[int]:
        return self.ledger.tokens(request_id)

    def final_events(self, request_id: str) -> list[FinalEvent]:
        events = self.ledger.events(request_id)
        return [event for event in events if isinstance(event, FinalEvent)]

    def num_kv_rows(self, request_id: str) -> list[int]:
        return [self.kv_pages.num_rows(request_id, g) for g in range(self.layout.num_groups)]

    def num_messages(self, queue: str) -> int:
        """Ready and unacked."""
        with self.hub.lock:
            found = self.hub.queues[queue]
            return len(found.ready) + sum(len(consumer.held) for consumer in found.consumers)

    def num_steps(self) -> int:
        """In the groups' queues and in the inboxes of workers."""
        steps = [q for q in list(self.hub.queues) if is_inbox(q)]
        steps += [self.queue(g) for g in range(self.layout.num_groups)]
        return sum(self.num_messages(queue) for queue in steps)

    def num_ready(self, queue: str) -> int:
        return self.front.depth(queue) or 0

    def num_dead(self) -> int:
        return self.num_ready(DEAD_QUEUE)

    def queued(self) -> dict[str, int]:
        return {name: self.num_messages(name) for name in self.hub.queues}

    def open_reply_queue(self, name: str, max_length: int | None = None) -> None:
        self.front.declare([QueueSpec(name, max_length=max_length)])

    def redeliver(self, queue: str) -> None:
        """As if a worker had taken what waits there and died: it comes as delivered before."""
        victim = self.new_broker()
        victim.consume(queue, prefetch=1_000)
        while victim.take(0.0) is not None:
            pass
        victim.close()

    def take_all(self, queue: str) -> list[Any]:
        """Take and settle what is ready in a queue; the decoded messages."""
        return [codec.decode(x.body, x.content_type) for x in self.take_deliveries(queue)]

    def take_deliveries(self, queue: str) -> list[Delivery]:
        """Take and settle what is ready in a queue."""
        tap = self._taps.get(queue)
        if tap is None:
            tap = self._taps[queue] = self.new_broker()
            tap.consume(queue, prefetch=1_000)
        deliveries = []
        while (delivery := tap.take(0.0)) is not None:
            deliveries.append(delivery)
            tap.ack(delivery)
        return deliveries

    def close_taps(self) -> None:
        """Let what comes from now on go to others again."""
        while self._taps:
            self._taps.popitem()[1].close()

    def replies(self, queue: str) -> list[Reply]:
        return self.take_all(queue)


def assert_answers(rig: Rig, asked: Iterable[tuple[str, Sequence[int], SamplingParams]]) -> None:
    """Each request has the reference's tokens and exactly one final event."""
    cut: dict[str, Any] = {}
    if rig.layout.wire is not Wire.F32:
        cut = {"num_groups": rig.layout.num_groups, "wire": rig.layout.wire}
    for request_id, prompt, sampling in asked:
        assert rig.tokens(request_id) == expected_tokens(tuple(prompt), sampling, **cut), request_id
        assert len(rig.final_events(request_id)) == 1
        assert not rig.record(request_id).error
