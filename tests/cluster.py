"""Runs a cluster's services as threads on real servers, with the code that its processes run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from services.loader.packed import PackedModel
from services.loader.upload import load_model
from services.scheduler.limits import SchedulerLimits
from services.scheduler.service import SchedulerService
from services.worker.service import WorkerOptions, WorkerService
from shared.broker.rabbitmq import RabbitmqBroker
from shared.messages import FinishReason, Request, SamplingParams
from shared.model.backend import pick_backend
from shared.producer import Producer, new_request_id
from shared.store.connection import Stores, connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.store.presence import Presence
from shared.store.shards import ShardStore
from shared.text.document import read_text_document
from shared.topology import Wire, even_layout
from tests.waiting import empty_step_queues


class ThreadCluster:
    """Servers are real; scheduler and workers are threads with connections of their own."""

    def __init__(
        self,
        amqp_url: str,
        redis_url: str,
        packed: PackedModel,
        *,
        num_groups: int,
        workers_per_group: int,
        wire: Wire = Wire.F32,
        scheduler_limits: SchedulerLimits = SchedulerLimits(),
    ) -> None:
        self._amqp_url = amqp_url
        self._redis_url = redis_url
        self._closing = ExitStack()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        try:
            self._bring_up(packed, num_groups, workers_per_group, wire, scheduler_limits)
        except BaseException:
            self._shut_down()  # what runs on would serve the requests of the next test
            raise

    def _bring_up(
        self,
        packed: PackedModel,
        num_groups: int,
        workers_per_group: int,
        wire: Wire,
        scheduler_limits: SchedulerLimits,
    ) -> None:
        stores = self.stores()
        manifest = packed.manifest
        self.layout = even_layout(
            manifest.model_id, manifest.config["num_hidden_layers"], num_groups, wire=wire
        )
        load_model(packed, ShardStore(stores.weights), self.layout)
        empty_step_queues(self._amqp_url, self.layout)
        for group in range(num_groups):
            for _ in range(workers_per_group):
                self._start(self._worker(group))
        self._start(self._scheduler(scheduler_limits))
        self.ledger = Ledger(stores.meta)
        tokenizer, _ = read_text_document(bytes(packed.read_shard("tokenizer")))
        self.producer = Producer(self.broker(), self.ledger, tokenizer=tokenizer)
        presence = Presence(stores.meta)
        deadline_s = time.monotonic() + 120
        while presence.coverage(self.layout) != [workers_per_group] * num_groups or not (
            all(worker.state == "serving" for worker in presence.workers(self.layout))
        ):
            self.check()
            assert time.monotonic() < deadline_s, "the workers did not come up"
            time.sleep(0.05)

    def ask(self, prompt: list[int], sampling: SamplingParams) -> tuple[list[int], FinalEvent]:
        """Submit a prompt of token ids and wait for its end."""
        request_id = new_request_id()
        request = Request(request_id=request_id, token_ids=tuple(prompt), sampling=sampling)
        self.producer.submit(request)
        return self.follow(request_id)

    def follow(self, request_id: str) -> tuple[list[int], FinalEvent]:
        tokens: list[int] = []
        for event in self.producer.events(request_id, silence_s=60, on_silence=self.check):
            if isinstance(event, TokenEvent):
                tokens.append(event.token_id)
            elif isinstance(event, FinalEvent):
                assert event.finish_reason is not FinishReason.ERROR, event.error
                return tokens, event
        raise AssertionError("no final event")

    def check(self) -> None:
        if self.failures:
            raise self.failures[0]

    def stores(self) -> Stores:
        stores = connect(self._redis_url)
        self._closing.callback(stores.close)
        return stores

    def broker(self) -> RabbitmqBroker:
        broker = RabbitmqBroker.connect(self._amqp_url)
        self._closing.callback(broker.close)
        return broker

    def _worker(self, group: int) -> Callable[[], None]:
        return WorkerService(
            WorkerOptions(groups=(group,)),
            broker=self.broker(),
            stores=self.stores(),
            backend=pick_backend(),
            stopping=self._stopping,
        ).run

    def _scheduler(self, limits: SchedulerLimits) -> Callable[[], None]:
        return SchedulerService(
            model="",
            broker=self.broker(),
            stores=self.stores(),
            stopping=self._stopping,
            limits=limits,
        ).run

    def _start(self, run: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:
                self.failures.append(error)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        self._threads.append(thread)

    def __enter__(self) -> ThreadCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._shut_down()
        if error is None:
            self.check()

    def _shut_down(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(timeout=30)
        self._closing.close()
