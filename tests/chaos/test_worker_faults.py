"""Worker processes that die or freeze at each place of a step, on real servers: no wrong token."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from services.chaos.reference import ReferenceModel
from services.loader.packed import open_packed
from shared.broker import connect as connect_broker
from shared.dead_letters import DeadLetter
from shared.messages import FinishReason, Request, SamplingParams
from shared.producer import Producer
from shared.store.connection import connect as connect_stores
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.topology import DEAD_QUEUE
from tests.gguf_files import write_gguf
from tests.processes import ProcessCluster

pytestmark = [pytest.mark.servers, pytest.mark.timeout(240)]

POINTS = ["receive", "write", "commit", "publish", "confirm"]
NUM_TOKENS = 24
PROMPTS = [[3 + (7 * n + 31 * i + i * i) % 250 for i in range(6 + n)] for n in range(4)]
Answer = tuple[list[int], FinalEvent]


class TinyCluster:
    """One scheduler and a good worker for each of two groups; tests add those that fail."""

    def __init__(self, amqp_url: str, redis_url: str, folder: Path) -> None:
        model = write_gguf(folder / "tiny.gguf")
        packed = open_packed(model, folder)
        self._reference = ReferenceModel(packed.manifest, packed.read_shard)
        self._reference_lock = threading.Lock()
        self._expected: dict[int, list[int]] = {}
        self._num_asked = 0
        self.processes = ProcessCluster(amqp_url, redis_url, folder)
        self.processes.load(model, groups=2)
        self.good = [self.processes.start("worker", "--group", str(g)) for g in (0, 1)]
        self.processes.start("scheduler")
        self.processes.wait_until_serving(2)
        self.stores = connect_stores(redis_url)
        self.broker = connect_broker(amqp_url)
        self.producer = Producer(self.broker, Ledger(self.stores.meta))

    def add(self, group: int, faults: str, num_workers: int) -> subprocess.Popen[bytes]:
        process = self.processes.start("worker", "--group", str(group), faults=faults)
        self.processes.wait_until_serving(num_workers)
        return process

    def params(self, number: int) -> SamplingParams:
        return SamplingParams(temperature=0.8, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True)

    def expected(self, number: int) -> list[int]:
        with self._reference_lock:  # it keeps scratch memory, and tests ask on several threads
            if number not in self._expected:
                params = self.params(number)
                self._expected[number] = self._reference.generate(PROMPTS[number], params)
            return self._expected[number]

    def submit(self, names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            self.producer.submit(
                Request(
                    name,
                    token_ids=tuple(PROMPTS[number % len(PROMPTS)]),
                    sampling=self.params(number % len(PROMPTS)),
                )
            )

    def answer(self, name: str) -> Answer:
        tokens: list[int] = []
        for event in self.producer.events(name, silence_s=40):
            if isinstance(event, TokenEvent):
                tokens.append(event.token_id)
            elif isinstance(event, FinalEvent):
                return tokens, event
        raise AssertionError("no final event")

    def assert_right(self, names: Sequence[str]) -> None:
        for number, name in enumerate(names):
            tokens, final = self.answer(name)
            assert not final.error, final.error
            assert tokens == self.expected(number % len(PROMPTS)), name

    def close(self) -> None:
        self.broker.close()
        self.stores.close()
        self.processes.__exit__(None, None, None)


@pytest.fixture
def cluster(amqp_url: str, fresh_redis_url: str, tmp_path: Path) -> Iterator[TinyCluster]:
    cluster = TinyCluster(amqp_url, fresh_redis_url, tmp_path)
    yield cluster
    cluster.close()


def is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has stopped itself."""
    stat = Path(f"/proc/{process.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def test_no_wrong_tokens_when_a_worker_is_killed_at_any_point(cluster: TinyCluster) -> None:
    for point in POINTS:
        victim = cluster.add(1, f"kill@{point}:5", num_workers=3)
        for attempt in range(10):  # until the router has given the victim its fifth step
            names = [f"kill-{point}-{attempt}-{n}" for n in range(4)]
            cluster.submit(names)
            cluster.assert_right(names)
            if victim.poll() is not None:
                break

        assert victim.wait(timeout=10) == -signal.SIGKILL, point
        cluster.processes.wait_until_serving(2)  # its ghost is gone


@pytest.mark.parametrize("point", POINTS)
def test_no_wrong_tokens_when_a_worker_is_frozen_and_comes_back(
    cluster: TinyCluster, point: str
) -> None:
    zombie = cluster.add(1, f"freeze@{point}:5", num_workers=3)
    names: list[str] = []
    while not is_stopped(zombie):  # until the router has given it its fifth step
        assert len(names) < 80, "it did not freeze"
        more = [f"freeze-{len(names) + n}" for n in range(4)]
        cluster.submit(more)
        names += more
        deadline_s = time.monotonic() + 5
        while not is_stopped(zombie) and time.monotonic() < deadline_s:
            time.sleep(0.02)

    cluster.assert_right(names)

    os.kill(zombie.pid, signal.SIGCONT)
    again = [f"again-{n}" for n in range(4)]
    cluster.submit(again)
    cluster.assert_right(again)
    for name in names:  # what the zombie did came too late to be seen
        assert len(cluster.answer(name)[0]) == NUM_TOKENS


def test_killer_input_is_dead_lettered_after_three(cluster: TinyCluster) -> None:
    # given workers of group 1 that die of the request "killer", each replaced when it does
    faults = "crash@compute:request_id=killer"
    cluster.good[1].terminate()
    cluster.good[1].wait(timeout=20)
    workers = [cluster.add(1, faults, num_workers=2)]
    others = [f"other-{n}" for n in range(50)]

    cluster.submit(others[:24])
    cluster.producer.submit(
        Request("killer", token_ids=tuple(PROMPTS[0]), sampling=cluster.params(0))
    )
    cluster.submit(others[24:])
    ledger = Ledger(cluster.stores.meta)
    deadline_s = time.monotonic() + 120
    while True:
        record = ledger.get("killer")
        if record is not None and record.finish_reason is not None:
            break
        assert time.monotonic() < deadline_s, cluster.processes.logs()
        if workers[-1].poll() is not None:
            workers.append(cluster.processes.start("worker", "--group", "1", faults=faults))
        time.sleep(0.1)
    for number, name in enumerate(others):
        tokens, final = cluster.answer(name)
        assert not final.error
        assert tokens == cluster.expected(number % 4)

    assert record.finish_reason is FinishReason.ERROR
    assert "died 3 times" in record.error
    assert [w.poll() for w in workers].count(-signal.SIGABRT) == 3
    cluster.broker.consume(DEAD_QUEUE, prefetch=1)
    letter = DeadLetter("")
    while letter.request_id != "killer":  # other tests may have left letters of theirs
        delivery = cluster.broker.take(10)
        assert delivery is not None
        letter = DeadLetter.of(delivery)
        cluster.broker.ack(delivery)
    assert (letter.request_id, letter.group, letter.attempts) == ("killer", 1, 3)
    assert len(letter.workers) == 3


def test_replacement_worker_mid_decode_continues_equal(cluster: TinyCluster) -> None:
    victim = cluster.good[1]
    names = [f"r-{n}" for n in range(4)]
    cluster.submit(names)
    first = next(
        e for e in cluster.producer.events(names[0], silence_s=30) if isinstance(e, TokenEvent)
    )
    assert first.token_id == cluster.expected(0)[0]

    victim.kill()
    cluster.processes.start("worker", "--group", "1")

    cluster.assert_right(names)


def test_a_hung_worker_ends_itself_and_changes_no_token(cluster: TinyCluster) -> None:
    victim = cluster.processes.start(
        "worker", "--group", "1", "--hang-limit", "2", faults="hang@compute:5"
    )
    cluster.processes.wait_until_serving(3)

    for attempt in range(10):  # until the router has given the victim its fifth step
        names = [f"hang-{attempt}-{n}" for n in range(4)]
        cluster.submit(names)
        cluster.assert_right(names)
        if victim.poll() is not None:
            break

    assert victim.wait(timeout=20) == 70
