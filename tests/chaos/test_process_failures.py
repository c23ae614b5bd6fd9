"""What other systems' users reported of their workers, as tests for ours, on real processes.

Each name is a report: see `docs/failure-model.md`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.chaos.reference import ReferenceModel
from services.loader.packed import PackedModel, open_packed
from shared.broker.base import Outgoing
from shared.broker.rabbitmq import RabbitmqBroker
from shared.errors import TransientError
from shared.messages import Request, SamplingParams
from shared.producer import Producer, new_request_id
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.store.presence import Presence
from shared.store.shards import ShardStore
from shared.topology import QueueSpec
from tests.cluster import ThreadCluster
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import CELLPIPE, REPO, ProcessCluster, environment
from tests.servers import PrivateServers
from tests.waiting import WAIT_S, take, wait_until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]

PROMPT = [5, 6, 7, 8, 9]
SAMPLING = SamplingParams(temperature=0.9, seed=4, max_tokens=24, ignore_eos=True)
PRESENCE_TTL_S = 5.0


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", TinyModel(layers=4))


@pytest.fixture
def packed(tiny_gguf: Path) -> PackedModel:
    return open_packed(tiny_gguf, tiny_gguf.parent)


@pytest.fixture
def cluster(amqp_url: str, fresh_redis_url: str, tmp_path: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.settings["CELLPIPE_CACHE_DIR"] = str(tmp_path)
        yield cluster


def load_tiny(cluster: ProcessCluster, tiny_gguf: Path, groups: int = 2) -> None:
    cluster.load(tiny_gguf, groups=groups)


def start_with_faults(cluster: ProcessCluster, faults: str, *args: str) -> subprocess.Popen[bytes]:
    cluster.settings["CELLPIPE_TEST_FAULTS"] = faults
    try:
        return cluster.start(*args)
    finally:
        del cluster.settings["CELLPIPE_TEST_FAULTS"]


def ended_within(process: subprocess.Popen[bytes], timeout_s: float) -> int:
    return process.wait(timeout_s)


def answer_of(ledger: Ledger, request_id: str) -> tuple[list[int], int]:
    """Token ids on record, and the number of ends."""
    events = ledger.events(request_id, count=10_000)
    ends = sum(isinstance(event, FinalEvent) for event in events)
    return [event.token_id for event in events if isinstance(event, TokenEvent)], ends


def test_confirm_deadline_fires_and_effect_is_once(
    own_servers: PrivateServers, packed: PackedModel
) -> None:
    amqp_url, redis_url = own_servers.url("rabbitmq"), own_servers.url("redis")
    expected = ReferenceModel(packed.manifest, packed.read_shard).generate(PROMPT, SAMPLING)
    with ThreadCluster(amqp_url, redis_url, packed, num_groups=2, workers_per_group=1) as cluster:
        request = Request(new_request_id(), token_ids=tuple(PROMPT), sampling=SAMPLING)
        own_servers.freeze("rabbitmq")
        try:
            began = time.monotonic()
            with pytest.raises(TransientError):
                cluster.producer.submit(request, timeout_s=0.5)
            assert time.monotonic() - began < 2.0
        finally:
            own_servers.thaw("rabbitmq")

        cluster.producer.submit(request)  # its fate was unknown: now it may be there twice

        tokens, _ = cluster.follow(request.request_id)
        cluster.ask(PROMPT, SAMPLING)  # whatever the copy does, it has done by now
        assert tokens == expected
        assert answer_of(cluster.ledger, request.request_id) == (expected, 1)


def test_sigterm_during_alarm_exits_within_grace(tiny_gguf: Path, tmp_path: Path) -> None:
    with closing(PrivateServers()) as servers:
        settings = {
            "CELLPIPE_AMQP_URL": servers.url("rabbitmq"),
            "CELLPIPE_REDIS_URL": servers.url("redis"),
        }
        cluster = ProcessCluster(*settings.values(), tmp_path)
        load_tiny(cluster, tiny_gguf)
        with closing(RabbitmqBroker.connect(settings["CELLPIPE_AMQP_URL"])) as broker:
            with closing(connect(settings["CELLPIPE_REDIS_URL"])) as stores:
                cluster.start("scheduler")
                cluster.wait_until(lambda status: bool(status["schedulers"]))
                producer = Producer(broker, Ledger(stores.meta))
                servers.restart_with("rabbitmq", "vm_memory_high_watermark.relative = 0.0001")
                wait_until(broker.connected, "it is connected again", timeout_s=60)
                with pytest.raises(TransientError):  # a publisher is held up for good
                    producer.submit(
                        Request("r-1", token_ids=tuple(PROMPT), sampling=SAMPLING), timeout_s=1.0
                    )
                worker = cluster.start("worker", "--group", "0")
                cluster.wait_until(lambda status: len(status["workers"]) == 1)
                with cluster:
                    processes = [*cluster.processes]
                    for process in processes:
                        process.send_signal(signal.SIGTERM)
                    codes = [ended_within(process, 10.0) for process in processes]

            began = time.monotonic()
            broker.close(grace_s=2.0)
            assert time.monotonic() - began < 3.0
        assert codes == [0, 0], cluster.logs()
        assert worker.returncode == 0


@pytest.mark.parametrize("moment", ["idle", "compute", "publish"])
def test_sigterm_idle_mid_compute_mid_confirm_is_clean(
    cluster: ProcessCluster, tiny_gguf: Path, moment: str
) -> None:
    load_tiny(cluster, tiny_gguf, groups=1)
    faults = "" if moment == "idle" else f"slow@{moment}:seconds=0.2"
    leaver = start_with_faults(cluster, faults, "worker")
    cluster.start("scheduler")
    cluster.wait_until_serving(1)
    result: list[subprocess.CompletedProcess[str]] = []

    def ask() -> None:
        result.append(cluster.run("run", "--cluster", "--raw", "hello", "--json", "-n", "20"))

    asker = threading.Thread(target=ask)
    if moment != "idle":
        asker.start()
        wait_until(lambda: steps_of(cluster) > 0, "it computes")
    leaver.send_signal(signal.SIGTERM)
    code = ended_within(leaver, 10.0)
    left = cluster.status()["workers"]
    cluster.start("worker")
    if moment == "idle":
        cluster.wait_until_serving(1)
        asker.start()
    asker.join(60)

    assert code == 0, cluster.logs()
    assert left == []
    assert result[0].returncode == 0, result[0].stderr + cluster.logs()
    assert "Traceback" not in cluster.logs()


def steps_of(cluster: ProcessCluster) -> int:
    return sum(worker["num_steps"] for worker in cluster.status()["workers"])


def test_status_never_shows_running_without_a_live_owner(
    cluster: ProcessCluster, tiny_gguf: Path, fresh_redis_url: str
) -> None:
    load_tiny(cluster, tiny_gguf, groups=1)
    processes = [cluster.start("worker"), cluster.start("scheduler")]
    cluster.wait_until_serving(1)

    for process in processes:
        process.kill()
        process.wait()
    killed_s = time.monotonic()

    with closing(connect(fresh_redis_url)) as stores:
        presence = Presence(stores.meta)
        layout = ShardStore(stores.weights).active_layout("")
        wait_until(lambda: not presence.workers(layout) and not presence.schedulers(), "all gone")
    assert time.monotonic() - killed_s < PRESENCE_TTL_S + 1.0
    status = cluster.status()
    assert (status["workers"], status["schedulers"]) == ([], [])
    assert any("no scheduler" in problem for problem in status["problems"])
    assert json.loads(cluster.run("workers", "--json").stdout) == []


def test_presence_goes_red_when_consumption_stops(
    cluster: ProcessCluster, tiny_gguf: Path, fresh_redis_url: str, amqp_url: str
) -> None:
    load_tiny(cluster, tiny_gguf, groups=1)
    hung = start_with_faults(cluster, "hang@compute:1", "worker", "--hang-limit", "120")
    cluster.start("scheduler")
    cluster.wait_until_serving(1)
    with (
        closing(connect(fresh_redis_url)) as stores,
        closing(RabbitmqBroker.connect(amqp_url)) as broker,
    ):
        presence = Presence(stores.meta)
        layout = ShardStore(stores.weights).active_layout("")
        producer = Producer(broker, Ledger(stores.meta))

        producer.submit(Request(new_request_id(), token_ids=(5, 6), sampling=SAMPLING))

        # Its process and its connections are well, and it heartbeats from the loop that hangs.
        wait_until(lambda: presence.workers(layout) == [], "nobody takes it for alive")
        assert hung.poll() is None
    hung.kill()


def test_native_code_three_ttls_long_is_not_declared_dead(
    cluster: ProcessCluster, tiny_gguf: Path, packed: PackedModel
) -> None:
    """Or is fenced: its work goes to the other, and what it brings later changes nothing."""
    expected = ReferenceModel(packed.manifest, packed.read_shard).generate(PROMPT, SAMPLING)
    load_tiny(cluster, tiny_gguf, groups=1)
    seconds = 3 * PRESENCE_TTL_S
    slow = start_with_faults(cluster, f"slow@compute:3,seconds={seconds}", "worker")
    cluster.start("worker")
    cluster.start("scheduler")
    cluster.wait_until_serving(2)
    with (
        closing(connect(cluster.settings["CELLPIPE_REDIS_URL"])) as stores,
        closing(RabbitmqBroker.connect(cluster.settings["CELLPIPE_AMQP_URL"])) as broker,
    ):
        ledger = Ledger(stores.meta)
        producer = Producer(broker, ledger)
        asked = [Request(new_request_id(), token_ids=tuple(PROMPT), sampling=SAMPLING)
                 for _ in range(4)]  # fmt: skip
        for request in asked:
            producer.submit(request)
        wait_until(
            lambda: all(answer_of(ledger, r.request_id)[1] for r in asked), "all are answered"
        )

        cluster.wait_until_serving(2)  # it was busy, not dead: it is back by itself

        assert slow.poll() is None
        assert [answer_of(ledger, r.request_id) for r in asked] == [(expected, 1)] * len(asked)


def test_consumer_timeout_of_the_broker_is_survived(tmp_path: Path) -> None:
    with closing(PrivateServers()) as servers:
        servers.url("rabbitmq")
        # The shortest that a broker looks for is a minute, unless it is told to look more often.
        servers.restart_with(
            "rabbitmq",
            "consumer_timeout = 1500",
            advanced="[{rabbit, [{channel_tick_interval, 500}]}]",
        )
        with closing(RabbitmqBroker.connect(servers.url("rabbitmq"))) as broker:
            broker.declare([QueueSpec("cellpipe.test.held")])
            broker.consume("cellpipe.test.held", prefetch=4)
            broker.publish([Outgoing("cellpipe.test.held", b"long")]).wait(WAIT_S)
            held = take(broker)

            again = take(broker)  # the broker has taken it away and given it out again

            broker.ack(held)
            broker.ack(again)
            assert again.redelivered
            broker.publish([Outgoing("cellpipe.test.held", b"next")]).wait(WAIT_S)
            assert take(broker).body == b"next"


def test_honcho_stop_start_loop_strands_nothing(
    cluster: ProcessCluster, tiny_gguf: Path, tmp_path: Path
) -> None:
    load_tiny(cluster, tiny_gguf, groups=2)
    respawn = REPO / "infra" / "respawn"
    command = " ".join(CELLPIPE)
    procfile = tmp_path / "Procfile"
    procfile.write_text(
        f"scheduler: {respawn} {command} scheduler\nworker: {respawn} {command} worker\n"
    )
    honcho = shutil.which("honcho", path=str(Path(sys.executable).parent)) or "honcho"
    with (
        closing(connect(cluster.settings["CELLPIPE_REDIS_URL"])) as stores,
        closing(RabbitmqBroker.connect(cluster.settings["CELLPIPE_AMQP_URL"])) as broker,
    ):
        ledger = Ledger(stores.meta)
        producer = Producer(broker, ledger)
        asked: list[str] = []
        for round_number in range(3):
            runner = subprocess.Popen(
                [honcho, "start", "-f", str(procfile), "-d", str(REPO), "-c", "worker=2"],
                env=environment(cluster.settings),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                for _ in range(4):
                    asked.append(new_request_id())
                    producer.submit(Request(asked[-1], token_ids=tuple(PROMPT), sampling=SAMPLING))
                done = len(asked) if round_number == 2 else len(asked) - 3
                wait_until(
                    lambda done=done: sum(answer_of(ledger, i)[1] for i in asked) >= done,
                    "requests are answered",
                    timeout_s=40,
                )
            finally:
                runner.send_signal(signal.SIGTERM)
                runner.wait(30)
        answers = [answer_of(ledger, request_id) for request_id in asked]

    assert {ends for _, ends in answers} == {1}
    assert len({tuple(tokens) for tokens, _ in answers}) == 1
    assert not [line for line in _orphans(str(procfile)) if line]


def _orphans(procfile: str) -> list[str]:
    """Processes of our session that still name this Procfile."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if procfile in line:
                found.append(line)
    return found
