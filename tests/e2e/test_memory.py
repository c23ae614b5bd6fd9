"""A worker's memory is its shards and a small, known rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import ProcessCluster

pytestmark = [pytest.mark.real_model, pytest.mark.servers]

REST_BYTES = 90_000_000


def test_a_worker_of_ten_layers_peaks_below_its_shards_and_90_mb(
    amqp_url: str, fresh_redis_url: str, real_model_path: Path, tmp_path: Path
) -> None:
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        loaded = cluster.run("load", str(real_model_path), "--groups", "3")
        assert loaded.returncode == 0, loaded.stderr
        for group in range(3):
            cluster.start("worker", "--group", str(group))
        cluster.start("scheduler")
        cluster.wait_until_serving(3)

        answer = cluster.run("run", "--cluster", "Name three colours.", "--max-tokens", "16")
        status = cluster.wait_until(
            lambda status: all(worker["num_steps"] for worker in status["workers"])
        )

    assert answer.returncode == 0, answer.stderr
    for worker in status["workers"]:
        assert worker["peak_rss_bytes"] >= worker["rss_bytes"] > worker["shard_bytes"] > 0
        assert worker["peak_rss_bytes"] <= worker["shard_bytes"] + REST_BYTES, worker
