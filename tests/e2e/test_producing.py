"""The examples of docs/producing.md get their answers from a cluster, with no code of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from services.loader.packed import open_packed
from shared.producer import Producer, open_producer
from shared.topology import REQUESTS_QUEUE
from tests.cluster import ThreadCluster
from tests.gguf_files import write_gguf
from tests.producing import blocks, schemas
from tests.waiting import delete_queue

pytestmark = [pytest.mark.servers, pytest.mark.timeout(300)]

QUESTION = "hello wörld"


@pytest.fixture
def cluster(amqp_url: str, fresh_redis_url: str, tmp_path: Path) -> Iterator[ThreadCluster]:
    packed = open_packed(write_gguf(tmp_path / "tiny.gguf"), tmp_path)
    with ThreadCluster(
        amqp_url, fresh_redis_url, packed, num_groups=1, workers_per_group=1
    ) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with amqplib in it."""
    npm = shutil.which("npm")
    if npm is None:
        if os.environ.get("CI"):
            pytest.fail("npm is missing")
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("node")
    installed = subprocess.run(
        [npm, "install", "--no-audit", "--no-fund", "--loglevel=error", "amqplib@0.10"],
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return folder


def ask(command: list[str], amqp_url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run an example where none of our code is in reach."""
    return subprocess.run(
        [*command, QUESTION],
        env={"PATH": os.environ["PATH"], "CELLPIPE_AMQP_URL": amqp_url, "LC_ALL": "C.UTF-8"},
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def assert_answered(
    done: subprocess.CompletedProcess[str], producer: Producer, cluster: ThreadCluster
) -> None:
    """It printed the tokens' text, and then the reply that the ledger tells of too."""
    assert done.returncode == 0, done.stderr
    reply: dict[str, Any] = json.loads(done.stdout)
    jsonschema.validate(reply, schemas()["reply.v1"])
    known = producer.result(reply["request_id"], timeout_s=10)
    assert (reply["text"], tuple(reply["token_ids"])) == (known.text, known.token_ids)
    assert len(known.token_ids) > 0
    assert known.text.startswith(done.stderr)
    assert len(done.stderr) >= len(known.text) - 1
    cluster.check()


def test_the_pika_example_gets_its_answer(
    cluster: ThreadCluster, amqp_url: str, fresh_redis_url: str, tmp_path: Path
) -> None:
    (example,) = blocks("python")
    (tmp_path / "ask.py").write_text(example)

    done = ask([sys.executable, "-P", "ask.py"], amqp_url, tmp_path)

    with open_producer(amqp_url, fresh_redis_url) as producer:
        assert_answered(done, producer, cluster)


def test_the_node_example_gets_its_answer(
    cluster: ThreadCluster, amqp_url: str, fresh_redis_url: str, node_folder: Path
) -> None:
    (example,) = blocks("js")
    (node_folder / "ask.js").write_text(example)

    done = ask(["node", "ask.js"], amqp_url, node_folder)

    with open_producer(amqp_url, fresh_redis_url) as producer:
        assert_answered(done, producer, cluster)


def test_without_a_cluster_the_node_example_says_so(amqp_url: str, node_folder: Path) -> None:
    (example,) = blocks("js")
    (node_folder / "ask.js").write_text(example)
    delete_queue(amqp_url, REQUESTS_QUEUE)

    done = ask(["node", "ask.js"], amqp_url, node_folder)

    assert done.returncode == 1
    assert "no scheduler has ever run here" in done.stderr
