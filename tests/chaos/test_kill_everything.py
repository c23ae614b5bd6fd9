"""Every process and both servers die at once, and nothing that was accepted is lost.

What survives is what servers keep: requests in RabbitMQ's durable queue, their records in Redis.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from services.chaos.reference import ReferenceModel
from services.loader.packed import PackedModel, open_packed
from shared.broker.rabbitmq import RabbitmqBroker
from shared.dead_queue import DeadQueue
from shared.errors import TransientError
from shared.messages import FinishReason, Request, SamplingParams
from shared.producer import Producer
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import Event, FinalEvent, TokenEvent
from shared.store.shards import ShardStore
from shared.topology import REQUESTS_QUEUE, group_queue
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import ProcessCluster
from tests.servers import PrivateServers
from tests.waiting import wait_until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

NUM_GROUPS = 2
WORKERS_PER_GROUP = 2
NUM_REQUESTS = 48
LOST_S = 1.0
# A hundred tokens take 4 s at least, on the quickest machine: so there is something to lose.
SLOWLY = "slow@compute:seconds=0.02"
MAX_IN_FLIGHT = 8  # of a scheduler, which takes twice as many: others are queued at the broker
SEEDS = [int(text) for text in os.environ.get("CELLPIPE_TEST_SEEDS", "1").split(",")]


@pytest.fixture
def servers() -> Iterator[PrivateServers]:
    """Servers of this test alone, to be killed."""
    with closing(PrivateServers()) as servers:
        yield servers


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", TinyModel(layers=4, context=512))


def draw_requests(rng: random.Random) -> list[Request]:
    """Greedy and sampled in turn; one in ten leaves its seed to the scheduler."""
    return [
        Request(
            f"r-{number}",
            token_ids=tuple(rng.randrange(3, 250) for _ in range(rng.randint(2, 40))),
            sampling=SamplingParams(
                temperature=0.9 * (number % 2),
                seed=None if number % 10 == 9 else number,
                max_tokens=rng.randint(10, 200),
                ignore_eos=True,
            ),
        )
        for number in range(NUM_REQUESTS)
    ]


class Submitter:
    """Hands requests over until the broker is gone; `accepted` are those it confirmed."""

    def __init__(self, producer: Producer, requests: Sequence[Request], every_s: float) -> None:
        self.accepted: list[str] = []
        self._producer = producer
        self._requests = requests
        self._every_s = every_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Submitter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)

    def _run(self) -> None:
        for request in self._requests:
            try:
                self._producer.submit(request, timeout_s=2.0)
            except TransientError:
                return  # of unknown fate
            self.accepted.append(request.request_id)
            if self._stopping.wait(self._every_s):
                return


def start_processes(cluster: ProcessCluster, num_schedulers: int, *, faults: str = "") -> None:
    for group in range(NUM_GROUPS):
        for _ in range(WORKERS_PER_GROUP):
            cluster.start("worker", "--group", str(group), faults=faults)
    for _ in range(num_schedulers):
        cluster.start("scheduler", "--max-requests", str(MAX_IN_FLIGHT))


def kill_everything(cluster: ProcessCluster, servers: PrivateServers, rng: random.Random) -> None:
    victims = [*cluster.processes, "rabbitmq", "redis"]
    rng.shuffle(victims)
    for victim in victims:
        if isinstance(victim, str):
            servers.kill(victim)
        else:
            victim.kill()
    for process in cluster.processes:
        assert process.wait(10) == -signal.SIGKILL, cluster.logs()


def events_of(ledger: Ledger, request_id: str) -> list[Event]:
    return ledger.events(request_id, count=10_000)


def token_ids(events: Sequence[Event]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def expected_answers(
    packed: PackedModel, ledger: Ledger, requests: Sequence[Request]
) -> list[list[int]]:
    """What one undisturbed process answers, with the seeds that were drawn."""
    questions = []
    for request in requests:
        record = ledger.get(request.request_id)
        assert record is not None
        assert request.token_ids is not None
        assert request.sampling.seed in (None, record.sampling.seed)
        sampling = replace(request.sampling, seed=record.sampling.seed)
        questions.append((request.token_ids, sampling))
    return ReferenceModel(packed.manifest, packed.read_shard).generate_all(questions)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["processes", "machines"])
def test_everything_is_killed_and_every_accepted_request_completes(
    servers: PrivateServers, tiny_gguf: Path, tmp_path: Path, what: str, seed: int
) -> None:
    """Machines take with them what Redis had not yet on the disk: its last second."""
    rng = random.Random(f"everything/{what}/{seed}")
    requests = draw_requests(rng)
    num_schedulers = rng.choice((1, 2))
    with ExitStack() as stack:
        urls = servers.url("rabbitmq"), servers.url("redis")
        cluster = stack.enter_context(ProcessCluster(*urls, tmp_path))
        cluster.load(tiny_gguf, groups=NUM_GROUPS)
        stores = stack.enter_context(closing(connect(urls[1])))
        ledger = Ledger(stores.meta)
        layout = ShardStore(stores.weights).active_layout("")
        start_processes(cluster, num_schedulers, faults=SLOWLY)
        cluster.wait_until_serving(NUM_GROUPS * WORKERS_PER_GROUP)
        broker = stack.enter_context(closing(RabbitmqBroker.connect(urls[0])))
        producer = Producer(broker, ledger)

        # given: some have ended, many are mid-way, some are queued, one may be on its way
        with Submitter(producer, requests, every_s=rng.choice((0.0, 0.01, 0.05))) as submitter:
            wait_until(lambda: len(events_of(ledger, "r-0")) > 8, "the first is answered")
            time.sleep(rng.uniform(0.0, 3.0))
            on_disk_bytes = servers.log_bytes()
            time.sleep(LOST_S)
            seen = {r.request_id: events_of(ledger, r.request_id) for r in requests}
            kill_everything(cluster, servers, rng)
        ended = {i for i, events in seen.items() if any(isinstance(e, FinalEvent) for e in events)}
        midway = {i for i, events in seen.items() if events} - ended
        accepted = [r for r in requests if r.request_id in submitter.accepted]
        print(
            f"seed {seed}: {len(accepted)} of {NUM_REQUESTS} accepted, {len(ended)} had ended, "
            f"{len(midway)} were mid-way"
        )
        assert midway, "the power went when there was nothing to lose"

        if what == "machines":
            lost_bytes = servers.log_bytes() - on_disk_bytes
            servers.cut_log(servers.log_bytes() - rng.randint(lost_bytes // 2, lost_bytes))

        # when
        assert (servers.url("rabbitmq"), servers.url("redis")) == urls
        start_processes(cluster, num_schedulers)
        began_s = time.monotonic()

        # then
        ids = [request.request_id for request in accepted]

        def have_ended() -> bool:
            try:
                states = ledger.states(ids)
            except TransientError:
                return False
            return len(states) == len(ids) and all(s.finish_reason for s in states.values())

        try:
            wait_until(have_ended, "all accepted requests have ended", timeout_s=180)
        except AssertionError as error:
            raise AssertionError(f"{ledger.states(ids)}\n{cluster.logs()}") from error
        print(f"seed {seed}: all had ended {time.monotonic() - began_s:.1f} s after the start")
        expected = expected_answers(
            packed=open_packed(tiny_gguf, tmp_path), ledger=ledger, requests=accepted
        )
        for request, answer in zip(accepted, expected, strict=True):
            events = events_of(ledger, request.request_id)
            assert token_ids(events) == answer, request.request_id
            assert [e.finish_reason for e in events if isinstance(e, FinalEvent)] == [
                FinishReason.LENGTH
            ]
            assert isinstance(events[-1], FinalEvent)
            before = token_ids(seen[request.request_id])
            assert answer[: len(before)] == before, "a reader was told something else"
        cluster.wait_until(lambda status: all(s["num_requests"] == 0 for s in status["schedulers"]))
        queues = [REQUESTS_QUEUE] + [
            group_queue(layout.model_id, layout.layout_id, group) for group in range(NUM_GROUPS)
        ]
        wait_until(lambda: not any(broker.depth(queue) for queue in queues), "queues are empty")
        assert DeadQueue(broker, ledger).letters() == []
