"""More requests than the cluster takes: whoever is refused hears so, nobody else notices."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from shared import codec
from shared.broker.base import Outgoing
from shared.broker.rabbitmq import RabbitmqBroker
from shared.errors import Overloaded
from shared.messages import FinishReason, Reply, Request, SamplingParams
from shared.producer import Producer, new_request_id
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_base import START
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.topology import DEAD_QUEUE, REQUESTS_QUEUE, QueueSpec, control_queues
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import ProcessCluster
from tests.servers import PrivateServers
from tests.waiting import delete_queue, take, wait_until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

NUM_PRODUCERS = 12
NUM_REQUESTS_EACH = 20
NUM_TOKENS = 4
LIMIT = 40
# Each producer has one publish on its way while the quorum queue begins to refuse.
LIMIT_SLACK = 3 * NUM_PRODUCERS
SAMPLING = SamplingParams(seed=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PATIENCE_S = 90.0


@dataclass(frozen=True)
class Crowd:
    """A cluster with a loaded model of two groups, whose services are not started yet."""

    cluster: ProcessCluster
    broker: RabbitmqBroker
    ledger: Ledger
    servers: PrivateServers
    amqp_url: str

    def start(self, *, num_schedulers: int, max_requests: int) -> list[subprocess.Popen[bytes]]:
        """Start the services; returns the schedulers."""
        arguments = ("scheduler", "--max-requests", str(max_requests))
        schedulers = [self.cluster.start(*arguments) for _ in range(num_schedulers)]
        for group in range(2):
            self.cluster.start("worker", "--group", str(group))
        self.cluster.wait_until_serving(2)
        self.cluster.wait_until(lambda status: len(status["schedulers"]) == num_schedulers)
        return schedulers

    def end_of(self, request_id: str) -> FinalEvent | None:
        events = self.ledger.events(request_id, START, count=1_000)
        ends = [event for event in events if isinstance(event, FinalEvent)]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def tokens_of(self, request_id: str) -> list[tuple[int, int]]:
        events = self.ledger.events(request_id, START, count=1_000)
        return [(e.position, e.token_id) for e in events if isinstance(e, TokenEvent)]


@pytest.fixture
def crowd(own_servers: PrivateServers, tmp_path: Path) -> Iterator[Crowd]:
    amqp_url, redis_url = own_servers.url("rabbitmq"), own_servers.url("redis")
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    model = write_gguf(tmp_path / "tiny.gguf", TinyModel(layers=2))
    with (
        closing(connect(redis_url)) as stores,
        closing(RabbitmqBroker.connect(amqp_url)) as broker,
        ProcessCluster(amqp_url, redis_url, tmp_path) as cluster,
    ):
        cluster.settings["CELLPIPE_CACHE_DIR"] = str(tmp_path)
        cluster.load(model, groups=2)
        for spec in control_queues():
            delete_queue(amqp_url, spec.name)
        broker.declare(control_queues())
        yield Crowd(cluster, broker, Ledger(stores.meta), own_servers, amqp_url)


@contextmanager
def limited(servers: PrivateServers, **limits: int) -> Iterator[None]:
    servers.limit_queue(REQUESTS_QUEUE, **limits)
    yield
    servers.limit_queue(REQUESTS_QUEUE)


def flood(
    amqp_url: str, ledger: Ledger, requests: list[list[Request]]
) -> dict[str, Overloaded | None]:
    """Each list is submitted by a producer of its own, all at once; what each request met with."""

    def produce(own: list[Request]) -> dict[str, Overloaded | None]:
        with closing(RabbitmqBroker.connect(amqp_url)) as broker:
            producer = Producer(broker, ledger)
            barrier.wait(60)
            return {request.request_id: refusal_of(producer, request) for request in own}

    barrier = threading.Barrier(len(requests))
    with ThreadPoolExecutor(len(requests)) as pool:
        outcomes = list(pool.map(produce, requests))
    return {request_id: met for outcome in outcomes for request_id, met in outcome.items()}


def refusal_of(producer: Producer, request: Request) -> Overloaded | None:
    try:
        producer.submit(request)
    except Overloaded as error:
        return error
    return None


def test_each_of_many_producers_is_served_or_refused_and_nothing_comes_twice(crowd: Crowd) -> None:
    requests = [
        [
            Request(new_request_id(), token_ids=(5, 6, 7), sampling=SAMPLING)
            for _ in range(NUM_REQUESTS_EACH)
        ]
        for _ in range(NUM_PRODUCERS)
    ]
    every = {request.request_id: request for own in requests for request in own}

    with limited(crowd.servers, max_length=LIMIT):
        # when nobody serves, the queue takes what it holds and refuses the rest
        met = flood(crowd.amqp_url, crowd.ledger, requests)

        accepted = {request_id for request_id, error in met.items() if error is None}
        refusals = [error for error in met.values() if error is not None]
        assert LIMIT <= len(accepted) <= LIMIT + LIMIT_SLACK
        assert crowd.broker.depth(REQUESTS_QUEUE) == len(accepted)
        assert all("no more requests for now" in str(error) for error in refusals)
        assert all(error.retry_after_s > 0 for error in refusals)

        # so does the command line, with an exit code of its own
        run = crowd.cluster.run("run", "--cluster", "--raw", "hello")
        assert run.returncode == 4
        assert "no more requests for now" in run.stderr
        assert re.search(r"try again in \d+ s", run.stderr)
        assert "Traceback" not in run.stderr

        # when it is served, half of those that were refused come again until they are taken
        again = sorted(set(every) - accepted)[::2]
        crowd.start(num_schedulers=1, max_requests=8)
        producer = Producer(crowd.broker, crowd.ledger)
        for request_id in again:
            wait_until(
                lambda taken=request_id: refusal_of(producer, every[taken]) is None,  # type: ignore[misc]
                "a refused request is taken",
                timeout_s=PATIENCE_S,
            )
        wait_until(
            lambda: all(crowd.end_of(request_id) for request_id in accepted | set(again)),
            "all that were taken have ended",
            timeout_s=PATIENCE_S,
        )

    # then each has one answer, the same for all, and of the others there is no trace
    answers = {tuple(crowd.tokens_of(request_id)) for request_id in accepted | set(again)}
    assert len(answers) == 1
    assert [position for position, _ in answers.pop()] == list(range(3, 3 + NUM_TOKENS))
    assert set(crowd.ledger.states(every)) == accepted | set(again)
    wait_until(lambda: crowd.broker.depth(REQUESTS_QUEUE) == 0, "the queue is empty")
    assert crowd.broker.depth(DEAD_QUEUE) == 0


def test_a_flood_of_large_requests_takes_no_memory(crowd: Crowd) -> None:
    # given 360 MB of requests, and room for 16 MiB of them in the queue
    prompt = "a" * (2 << 20)
    requests = [[Request(new_request_id(), prompt=prompt) for _ in range(60)] for _ in range(3)]
    broker_pid = crowd.servers.pid("rabbitmq")
    before_mb = memory_mb(broker_pid, "VmRSS")

    with limited(crowd.servers, max_length_bytes=16 << 20):
        met = flood(crowd.amqp_url, crowd.ledger, requests)
        accepted = [request_id for request_id, error in met.items() if error is None]
        grown_mb = memory_mb(broker_pid, "VmRSS") - before_mb
        (scheduler,) = crowd.start(num_schedulers=1, max_requests=4)
        wait_until(
            lambda: all(crowd.end_of(request_id) for request_id in accepted),
            "all that were taken have ended",
            timeout_s=PATIENCE_S,
        )

    assert 8 <= len(accepted) <= 8 + 3 * 3
    assert grown_mb < 150
    assert memory_mb(scheduler.pid, "VmHWM") < 180
    ends = [crowd.end_of(request_id) for request_id in accepted]
    assert all(end is not None and end.finish_reason is FinishReason.ERROR for end in ends)


def memory_mb(pid: int, field: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    match = re.search(rf"{field}:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) / 1e3


def test_nobody_is_overtaken_by_more_than_is_in_flight(crowd: Crowd) -> None:
    """One dumps 300 requests, another submits one, the first goes on; a scheduler is killed."""
    max_requests, answers = 8, "cellpipe.test.overload.answers"
    schedulers = crowd.start(num_schedulers=2, max_requests=max_requests)
    names = [f"dump{n}" for n in range(300)] + ["other"] + [f"more{n}" for n in range(60)]
    with closing(RabbitmqBroker.connect(crowd.amqp_url)) as listener:
        listener.declare([QueueSpec(answers)])
        listener.consume(answers, prefetch=1_000)
        for name in names:
            request = Request(name, token_ids=(5, 6, 7), sampling=SAMPLING)
            outgoing = Outgoing(REQUESTS_QUEUE, codec.encode(request), True, reply_to=answers)
            crowd.broker.publish([outgoing]).wait(20)

        order: dict[str, int] = {}
        note_answers(listener, order, until=100)
        schedulers[0].kill()
        note_answers(listener, order, until=len(names))
    delete_queue(crowd.amqp_url, answers)

    places_lost = [order[name] - place for place, name in enumerate(names)]
    assert max(places_lost) <= 4 * max_requests  # what both hold, and as much again for the kill


def note_answers(listener: RabbitmqBroker, order: dict[str, int], *, until: int) -> None:
    """Put the place of each answered request into `order`; a second reply counts for nothing."""
    while len(order) < until:
        delivery = take(listener)
        reply = codec.decode(delivery.body, delivery.content_type)
        assert isinstance(reply, Reply)
        assert not reply.error
        order.setdefault(reply.request_id, len(order))
        listener.ack(delivery)
