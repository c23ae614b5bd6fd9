"""A worker's memory is its shards and a small, known rest, and never more than it was given."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from shared.config import parse_size
from shared.local_cluster.load import Load, Question, Sighting
from shared.local_cluster.start import connections
from shared.messages import FinishReason, SamplingParams
from shared.producer import Producer
from shared.store.ledger import Ledger
from tests.processes import ProcessCluster

pytestmark = [pytest.mark.real_model, pytest.mark.servers]

REST_BYTES = 90_000_000


def test_a_worker_of_ten_layers_peaks_below_its_shards_and_90_mb(
    amqp_url: str, fresh_redis_url: str, real_model_path: Path, tmp_path: Path
) -> None:
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.load(real_model_path, groups=3)
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


def questions(number: int, *, prompt: tuple[int, int], num_tokens: int) -> list[Question]:
    """Prompts of so many tokens; every other one begins alike, two in three repeat a passage."""
    rng = random.Random("memory")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(49_152) for _ in range(count)]

    beginning = tokens(prompt[0] // 2)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    asked = []
    for index in range(number):
        length = rng.randint(*prompt)
        begin = beginning if index % 2 else []
        rest = tokens(20) * (length // 20 + 1) if index % 3 else tokens(length)
        asked.append(Question(tuple([*begin, *rest][:length]), sampling))
    return asked


def ask(cluster: ProcessCluster, asked: list[Question], *, patience_s: float) -> list[Sighting]:
    """All of them at once."""
    with connections(cluster.settings) as (stores, broker):
        load = Load(
            Producer(broker, Ledger(stores.meta)),
            asked,
            num_requests=len(asked),
            concurrency=len(asked),
            patience_s=patience_s,
        )
        load.start()
        while load.is_running():
            time.sleep(0.1)
        load.stop()
    return load.sightings


@pytest.mark.parametrize(
    ("memory", "number", "prompt", "num_tokens"),
    [
        # Room for the rows of about 2,500 positions: three or four of these run, the others wait.
        pytest.param("188MiB", 10, (500, 800), 12, marks=pytest.mark.timeout(240)),
        pytest.param(
            "256MiB", 120, (200, 2_000), 40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]
        ),
    ],
)
def test_a_worker_at_its_limit_stays_within_its_memory_and_answers_all(
    amqp_url: str,
    fresh_redis_url: str,
    real_model_path: Path,
    tmp_path: Path,
    memory: str,
    number: int,
    prompt: tuple[int, int],
    num_tokens: int,
) -> None:
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.load(real_model_path, groups=2)
        for group in range(2):
            cluster.start("worker", "--group", str(group), "--memory", memory)
        cluster.start("scheduler", "--kv-budget", "256MiB")
        cluster.wait_until_serving(2)

        asked = questions(number, prompt=prompt, num_tokens=num_tokens)
        sightings = ask(cluster, asked, patience_s=1_500)
        status = cluster.status()

        assert all(process.poll() is None for process in cluster.processes), cluster.logs()
    for seen in sightings:
        assert seen.finish_reason is FinishReason.LENGTH, seen.error
        assert len(seen.tokens) == num_tokens
    limit_bytes = parse_size(memory, field="memory")
    for worker in status["workers"]:
        assert 0 < worker["rss_bytes"] <= worker["peak_rss_bytes"] <= limit_bytes, worker


def test_what_no_worker_has_memory_for_is_refused_before_it_starts(
    amqp_url: str, fresh_redis_url: str, real_model_path: Path, tmp_path: Path
) -> None:
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.load(real_model_path, groups=2)
        for group in range(2):
            cluster.start("worker", "--group", str(group), "--memory", "160MiB")
        cluster.start("scheduler")
        cluster.wait_until_serving(2)

        (seen,) = ask(cluster, questions(1, prompt=(1_900, 1_900), num_tokens=4), patience_s=60)

    assert seen.finish_reason is FinishReason.ERROR
    assert "--memory" in seen.error
    assert seen.tokens == []
