"""`cellpipe evaluate --cluster`: what the workers of a cluster know of a text."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from contextlib import closing
from pathlib import Path

import pytest
import redis

from shared.store.connection import connect
from shared.store.ledger import Ledger
from tests.gguf_files import TinyModel, write_gguf
from tests.processes import CELLPIPE, REPO, ProcessCluster, cellpipe, environment

pytestmark = [pytest.mark.servers, pytest.mark.timeout(120)]

TEXT = "hello world, here is a text; " * 30


def test_a_cluster_of_two_groups_gives_the_perplexity_of_one_process(
    amqp_url: str, fresh_redis_url: str, tmp_path: Path
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", TinyModel())
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ["--text", str(text), "--window", "64", "--windows", "2", "--json"]
    folder = {"CELLPIPE_CACHE_DIR": str(tmp_path)}

    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.settings |= folder
        cluster.load(model, groups=2)
        for command in (["worker", "--group", "0"], ["worker", "--group", "1"], ["scheduler"]):
            cluster.start(*command)
        alone = cellpipe("evaluate", str(model), *options, settings=folder)
        cluster.wait_until_serving(2)
        found = cluster.run("evaluate", "", *options, "--cluster")
        unknown = cluster.run("evaluate", "other", *options, "--cluster")
        interrupted = interrupt_an_evaluation(cluster, text)
        left = cluster.run("evaluate", "tiny", *options, "--cluster")

    assert alone.returncode == found.returncode == 0, alone.stderr + found.stderr
    embedded, served = json.loads(alone.stdout), json.loads(found.stdout)
    assert served.keys() == embedded.keys()
    assert served["num_scored"] == 62
    assert served["perplexity"] == pytest.approx(embedded["perplexity"], rel=1e-5)
    assert served["mean_loss"] == pytest.approx(embedded["mean_loss"], rel=1e-5)
    told = {"arithmetic", "perplexity", "perplexity_error", "mean_loss"}
    assert {k: v for k, v in served.items() if k not in told} == {
        k: v for k, v in embedded.items() if k not in told
    }
    assert served["arithmetic"] == "the kernel in a cluster, 2 layer groups over wire f32"
    assert (unknown.returncode, unknown.stderr.count("\n")) == (1, 2)
    assert "model 'other' has no active layout" in unknown.stderr
    assert interrupted == (130, "interrupted; the requests that ran are cancelled\n")
    assert json.loads(left.stdout) == served


def interrupt_an_evaluation(cluster: ProcessCluster, text: Path) -> tuple[int, str]:
    """Ctrl-C once some requests have ended; its exit code and what it says. None runs on."""
    url = cluster.settings["CELLPIPE_REDIS_URL"]
    command = ["evaluate", "tiny", "--text", str(text), "--window", "128", "--cluster"]
    with closing(connect(url)) as stores:
        ledger = Ledger(stores.meta)
        before = request_ids(url)
        process = subprocess.Popen(
            [*CELLPIPE, *command], env=environment(cluster.settings), cwd=REPO,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            while len(request_ids(url) - before) < 20:
                assert process.poll() is None, "it ended before it was interrupted"
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=30)
        finally:
            process.kill()
        states = ledger.states(request_ids(url) - before)
        assert all(state.finish_reason for state in states.values())
    return process.returncode, stderr


def request_ids(redis_url: str) -> set[str]:
    """Of all requests that the ledger knows."""
    with redis.Redis.from_url(redis_url) as client:
        keys = client.scan_iter("cellpipe:v1:{r-*}:events", count=1_000)
        return {key.decode().partition("{")[2].partition("}")[0] for key in keys}
