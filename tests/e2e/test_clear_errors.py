"""What goes wrong is said in one clear message: thing, remedy, exit code, no traceback."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from shared.broker.base import Outgoing
from shared.broker.rabbitmq import RabbitmqBroker
from shared.store import keys
from shared.store.connection import connect
from shared.store.shards import ShardStore
from shared.topology import DEAD_QUEUE, REQUESTS_QUEUE, group_queue
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import CELLPIPE, REPO, ProcessCluster, cellpipe, environment

CLOSED_PORT_URL = "127.0.0.1:1"


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def test_unknown_model_names_the_known_ones(tmp_path: Path) -> None:
    result = cellpipe("inspect", "llama-9000b", settings={"CELLPIPE_CACHE_DIR": str(tmp_path)})

    assert result.returncode == 1
    assert "llama-9000b" in result.stderr
    assert "smollm2-135m" in result.stderr
    assert "Traceback" not in result.stderr


def test_truncated_gguf_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    whole = tiny_gguf.read_bytes()
    tiny_gguf.write_bytes(whole[: len(whole) // 2])

    result = cellpipe("inspect", str(tiny_gguf), settings={"CELLPIPE_CACHE_DIR": str(tmp_path)})

    assert result.returncode == 1
    assert "tiny.gguf" in result.stderr
    assert "Traceback" not in result.stderr


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "odd.gguf", TinyModel(architecture="mamba9"))

    result = cellpipe("inspect", str(path), settings={"CELLPIPE_CACHE_DIR": str(tmp_path)})

    assert result.returncode == 1
    assert "mamba9" in result.stderr
    assert "llama" in result.stderr
    assert "Traceback" not in result.stderr


def test_no_cluster_says_what_to_set(tmp_path: Path) -> None:
    result = cellpipe("run", "--cluster", "hello", cwd=tmp_path)

    assert result.returncode == 2
    assert "CELLPIPE_AMQP_URL" in result.stderr
    assert "infra/servers up" in result.stderr


def test_the_prefix_cache_of_a_cluster_is_its_schedulers_matter(tmp_path: Path) -> None:
    result = cellpipe("run", "--cluster", "--no-prefix-cache", "hello", cwd=tmp_path)

    assert result.returncode == 2
    assert "cellpipe scheduler --no-prefix-cache" in result.stderr


@pytest.mark.parametrize("command", [["worker"], ["scheduler"], ["run", "--cluster", "hi"]])
def test_servers_that_are_down_are_named_without_their_password(command: list[str]) -> None:
    settings = {
        "CELLPIPE_AMQP_URL": f"amqp://user:s3cret@{CLOSED_PORT_URL}/",
        "CELLPIPE_REDIS_URL": f"redis://user:s3cret@{CLOSED_PORT_URL}/0",
    }

    result = cellpipe(*command, settings=settings)

    assert result.returncode == 3
    assert CLOSED_PORT_URL in result.stderr
    assert "s3cret" not in result.stderr + result.stdout
    assert "Traceback" not in result.stderr


def test_an_error_names_the_address_once_and_status_the_broker_first() -> None:
    settings = {
        "CELLPIPE_AMQP_URL": f"amqp://guest:guest@{CLOSED_PORT_URL}/",
        "CELLPIPE_REDIS_URL": f"redis://{CLOSED_PORT_URL}/0",
    }

    workers = cellpipe("workers", settings=settings)
    status = json.loads(cellpipe("status", "--json", settings=settings).stdout)

    assert workers.returncode == 3
    assert workers.stderr.count(CLOSED_PORT_URL) == 1
    assert [problem.split(" at ")[0] for problem in status["problems"]] == [
        "no RabbitMQ",
        "no connection to Redis",
    ]


@pytest.mark.servers
def test_a_broker_that_is_down_is_named(fresh_redis_url: str) -> None:
    settings = {
        "CELLPIPE_AMQP_URL": f"amqp://guest:guest@{CLOSED_PORT_URL}/",
        "CELLPIPE_REDIS_URL": fresh_redis_url,
    }

    result = cellpipe("worker", settings=settings)

    assert result.returncode == 3
    assert CLOSED_PORT_URL in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("url", ["http://h", "amqp://", "nonsense"])
def test_a_malformed_url_is_refused(url: str) -> None:
    settings = {"CELLPIPE_AMQP_URL": url, "CELLPIPE_REDIS_URL": "memory://"}

    result = cellpipe("worker", settings=settings)

    assert result.returncode != 0
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("text", [b"\xff\xfe", b"caf\xe9"])
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
@pytest.mark.parametrize("way", ["stdin", "argument", "chat"])
def test_a_prompt_that_is_not_utf_8_is_refused_by_name(
    tiny_gguf: Path, tmp_path: Path, text: bytes, locale: str, way: str
) -> None:
    command = ["chat"] if way == "chat" else ["run", "-" if way == "stdin" else text]

    result = subprocess.run(
        [*CELLPIPE, *command, "--embedded", "--model", str(tiny_gguf)],
        env=environment({"CELLPIPE_CACHE_DIR": str(tmp_path), "LC_ALL": locale}),
        cwd=REPO,
        input=b"" if way == "argument" else text + b"\n",
        capture_output=True,
        timeout=60,
        check=False,
    )

    assert result.returncode == 2
    assert b"UTF-8" in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e13", "1e300"])
def test_an_impossible_timeout_is_refused_before_anything_starts(seconds: str) -> None:
    result = cellpipe("run", "--embedded", "hello", "--timeout", seconds)

    assert result.returncode == 2
    assert "--timeout" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.servers
class TestWithServers:
    def test_no_model_loaded_says_how_to_load_one(
        self, amqp_url: str, fresh_redis_url: str, tmp_path: Path
    ) -> None:
        with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
            result = cluster.run("worker")

        assert result.returncode == 1
        assert "cellpipe load" in result.stderr
        assert "Traceback" not in result.stderr

    def test_a_group_that_does_not_exist_is_refused(
        self, amqp_url: str, fresh_redis_url: str, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
            _load(cluster, tiny_gguf, tmp_path)
            result = cluster.run("worker", "--group", "7")

        assert result.returncode == 2
        assert "--group" in result.stderr
        assert "7" in result.stderr

    def test_a_corrupt_segment_is_named_with_its_remedy(
        self, amqp_url: str, fresh_redis_url: str, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
            _load(cluster, tiny_gguf, tmp_path)
            stores = connect(fresh_redis_url)
            model_id = ShardStore(stores.weights).active_layout("").model_id
            key = keys.segment(model_id, "layer.1", 0)
            stores.weights.run(("SETRANGE", key, 40, b"\xff\x00\xff\x00"))
            stores.close()

            result = cluster.run("worker", "--group", "0", "--group", "1")
            repaired = cluster.run("load", str(tiny_gguf), "--groups", "2")

        assert result.returncode == 1
        assert "layer.1" in result.stderr
        assert "cellpipe load" in result.stderr
        assert "Traceback" not in result.stderr
        assert "1 sent" in repaired.stdout

    def test_a_group_without_workers_ends_the_request_with_its_name(
        self, amqp_url: str, fresh_redis_url: str, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
            _load(cluster, tiny_gguf, tmp_path)
            cluster.start("worker", "--group", "0")
            cluster.start("scheduler")

            result = cluster.run("run", "--cluster", "--raw", "hello")
            status = cluster.status()

        assert result.returncode == 1
        assert "layer group 1" in result.stderr
        assert "cellpipe worker --group 1" in result.stderr
        assert any("layer group 1" in problem for problem in status["problems"])

    def test_a_cluster_without_a_scheduler_is_said_to_lack_one(
        self, amqp_url: str, fresh_redis_url: str, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
            _load(cluster, tiny_gguf, tmp_path)

            result = cluster.run("run", "--cluster", "--raw", "hello", "--timeout", "1")

        assert result.returncode == 3
        assert "cellpipe scheduler" in result.stderr

    def test_garbage_is_dead_lettered_and_the_next_request_is_answered(
        self, amqp_url: str, fresh_redis_url: str, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
            _load(cluster, tiny_gguf, tmp_path)
            cluster.start("worker", "--group", "0", "--group", "1")
            cluster.start("scheduler")
            cluster.wait_until_serving(1)
            stores = connect(fresh_redis_url)
            layout = ShardStore(stores.weights).active_layout("")
            stores.close()
            broker = RabbitmqBroker.connect(amqp_url)
            dead_before = broker.depth(DEAD_QUEUE) or 0

            queues = [REQUESTS_QUEUE, *(group_queue(layout.model_id, layout.layout_id, g)
                                        for g in range(2))]  # fmt: skip
            broker.publish([Outgoing(q, b"\x93garbage") for q in queues]).wait(5)
            deadline_s = time.monotonic() + 20
            while (broker.depth(DEAD_QUEUE) or 0) < dead_before + 3:
                assert time.monotonic() < deadline_s, cluster.logs()
                time.sleep(0.05)
            broker.close()
            answer = cluster.run("run", "--cluster", "--raw", "hello", "--json", "-n", "4")

        assert answer.returncode == 0, answer.stderr
        assert len(json.loads(answer.stdout)["token_ids"]) in range(1, 5)

    def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(
        self, amqp_url: str, fresh_redis_url: str, tiny_gguf: Path, tmp_path: Path
    ) -> None:
        with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
            _load(cluster, tiny_gguf, tmp_path)
            cluster.start("scheduler")

            result = cluster.run("run", "--cluster", "--raw", "a " * 5000)

        assert result.returncode == 1
        assert "positions" in result.stderr


def _load(cluster: ProcessCluster, path: Path, cache: Path) -> None:
    cluster.settings["CELLPIPE_CACHE_DIR"] = str(cache / "cache")
    cluster.load(path, groups=2)
