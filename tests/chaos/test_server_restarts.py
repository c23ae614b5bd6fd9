"""Servers that die in the middle of answers, with what they held in memory, change no token."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.chaos.reference import ReferenceModel
from services.loader.packed import PackedModel, open_packed
from shared.broker.rabbitmq import RabbitmqBroker
from shared.messages import FinishReason, Request, SamplingParams
from shared.producer import Producer
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.text.document import read_text_document
from tests.contract.redis_server import RedisServer
from tests.processes import CELLPIPE, ProcessCluster, environment
from tests.servers import PrivateServers

pytestmark = [pytest.mark.real_model, pytest.mark.servers, pytest.mark.timeout(300)]

NUM_TOKENS = 64
PROMPTS = ["Once upon a time", "The capital of France is", "A cell is", "Rain falls because"]


@pytest.fixture
def own_servers() -> Iterator[PrivateServers]:
    """Servers of this test alone, to be killed."""
    servers = PrivateServers()
    yield servers
    servers.close()


@pytest.fixture
def kv_server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


class Run:
    """A cluster of two groups with one worker each, and requests that it answers."""

    def __init__(
        self, servers: PrivateServers, kv: RedisServer, model: Path, folder: Path, stack: ExitStack
    ) -> None:
        self.packed: PackedModel = open_packed(model, model.parent)
        amqp_url, redis_url = servers.url("rabbitmq"), servers.url("redis")
        self.cluster = stack.enter_context(ProcessCluster(amqp_url, redis_url, folder))
        self.cluster.settings["CELLPIPE_REDIS_KV_URL"] = kv.url
        self._stores = connect(redis_url)
        stack.callback(self._stores.close)
        self.ledger = Ledger(self._stores.meta)
        broker = RabbitmqBroker.connect(amqp_url)
        stack.callback(broker.close)
        self._producer = Producer(broker, self.ledger)
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.cluster.load(model, groups=2)
        self.workers = [self.cluster.start("worker", "--group", str(g)) for g in (0, 1)]
        self.cluster.start("scheduler")
        self.cluster.wait_until_serving(2)

    def submit_all(self) -> None:
        tokenizer, _ = read_text_document(bytes(self.packed.read_shard("tokenizer")))
        self.asked = {
            f"r{number}": (
                tokenizer.encode(prompt, parse_special=False),
                SamplingParams(
                    temperature=0.8, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
                ),
            )
            for number, prompt in enumerate(PROMPTS)
        }
        for request_id, (prompt, params) in self.asked.items():
            request = Request(request_id, token_ids=tuple(prompt), sampling=params)
            self._producer.submit(request)

    def num_tokens(self) -> list[int]:
        return [len(self.ledger.tokens(request_id)) for request_id in self.asked]

    def wait_for(self, holds: Callable[[], bool], *, timeout_s: float) -> float:
        """Seconds until it holds."""
        started_s = time.monotonic()
        while not holds():
            assert time.monotonic() - started_s < timeout_s, (
                f"{self.num_tokens()} tokens\n{self.cluster.logs()}"
            )
            time.sleep(0.02)
        return time.monotonic() - started_s

    def check_answers(self) -> None:
        """Every request ended once, with the tokens of one undisturbed process."""
        self.wait_for(lambda: all(self._has_ended(i) for i in self.asked), timeout_s=120)
        reference = ReferenceModel(self.packed.manifest, self.packed.read_shard)
        for request_id, (prompt, params) in self.asked.items():
            assert self.ledger.tokens(request_id) == reference.generate(prompt, params)
            record = self.ledger.get(request_id)
            assert record is not None
            assert record.finish_reason is FinishReason.LENGTH, record.error
        status = self.cluster.wait_until(
            lambda status: all(s["num_requests"] == 0 for s in status["schedulers"])
        )
        assert not status["problems"]

    def _has_ended(self, request_id: str) -> bool:
        state = self.ledger.states([request_id]).get(request_id)
        return state is not None and state.finish_reason is not None


@pytest.fixture
def run(
    own_servers: PrivateServers, kv_server: RedisServer, real_model_path: Path, tmp_path: Path
) -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(own_servers, kv_server, real_model_path, tmp_path, stack)


def test_broker_restart_mid_generation_equals_reference(
    run: Run, own_servers: PrivateServers
) -> None:
    run.submit_all()
    run.wait_for(lambda: min(run.num_tokens()) >= 8, timeout_s=60)

    own_servers.kill("rabbitmq")
    assert max(run.num_tokens()) < NUM_TOKENS, "it was over before the broker died"
    own_servers.url("rabbitmq")
    before = run.num_tokens()
    recovery_s = run.wait_for(
        lambda: all(now > then for now, then in zip(run.num_tokens(), before, strict=True)),
        timeout_s=60,
    )

    assert recovery_s < 10.0
    run.check_answers()
    print(f"broker restart: {recovery_s:.2f} s from its port open to a token of each request")


def test_kv_data_lost_mid_generation_equals_reference(run: Run, kv_server: RedisServer) -> None:
    """With the one worker that has copies of the rows: the prompt is computed again."""
    run.submit_all()
    run.wait_for(lambda: min(run.num_tokens()) >= 8, timeout_s=60)

    kv_server.stop()
    run.workers[0].kill()
    assert max(run.num_tokens()) < NUM_TOKENS, "it was over before the store died"
    kv_server.start()
    run.cluster.start("worker", "--group", "0")

    run.check_answers()


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_command_that_shows_an_answer_waits_for_a_store_that_restarts(
    run: Run, own_servers: PrivateServers, tmp_path: Path, command: str
) -> None:
    question = "Tell me a long story about a cell and its neighbours."
    common = ["--cluster", "-n", "120", "-t", "0"]
    arguments = {"run": ["run", question, *common], "chat": ["chat", *common]}[command]
    typed, shown, told = (tmp_path / name for name in ("typed", "shown", "told"))
    typed.write_text(f"{question}\n")

    def start() -> subprocess.Popen[bytes]:
        with typed.open("rb") as stdin, shown.open("wb") as stdout, told.open("wb") as stderr:
            return subprocess.Popen(
                [*CELLPIPE, *arguments],
                env=environment(run.cluster.settings),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )

    asked = start()
    run.wait_for(lambda: shown.stat().st_size > 20, timeout_s=60)
    own_servers.kill("redis")
    assert asked.poll() is None, "it was over before the store died"
    run.wait_for(lambda: "waiting" in told.read_text(), timeout_s=60)
    own_servers.url("redis")

    assert asked.wait(120) == 0, f"{told.read_text()}\n{run.cluster.logs()}"
    assert "Redis does not answer; waiting" in told.read_text()
    interrupted = shown.read_text()
    assert start().wait(120) == 0, told.read_text()
    assert shown.read_text() == interrupted
    assert "waiting" not in told.read_text()
