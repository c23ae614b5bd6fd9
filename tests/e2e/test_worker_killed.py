"""A worker that dies takes nothing with it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from services.chaos.reference import ReferenceModel
from services.loader.packed import open_packed
from shared.messages import SamplingParams
from shared.text.document import read_text_document
from tests.processes import ProcessCluster

pytestmark = [pytest.mark.real_model, pytest.mark.servers, pytest.mark.timeout(240)]

PROMPT = "Once upon a time there was a small machine that"
NUM_TOKENS = 200
SEED = 1


def test_killing_one_of_two_workers_mid_answer_changes_no_token(
    amqp_url: str, fresh_redis_url: str, real_model_path: Path, tmp_path: Path
) -> None:
    packed = open_packed(real_model_path, real_model_path.parent)
    tokenizer, _ = read_text_document(bytes(packed.read_shard("tokenizer")))
    prompt = tokenizer.encode(PROMPT, parse_special=False)
    params = SamplingParams(temperature=0.8, seed=SEED, max_tokens=NUM_TOKENS)
    expected = ReferenceModel(packed.manifest, packed.read_shard).generate(prompt, params)
    assert len(expected) == NUM_TOKENS, "choose a prompt whose answer is this long"

    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        loaded = cluster.run("load", str(real_model_path), "--groups", "2")
        assert loaded.returncode == 0, loaded.stderr
        victims = [cluster.start("worker", "--group", "1") for _ in range(2)]
        for _ in range(2):
            cluster.start("worker", "--group", "0")
        cluster.start("scheduler")
        cluster.wait_until_serving(4)
        killer = threading.Timer(3.0, os.kill, (victims[0].pid, signal.SIGKILL))
        killer.start()
        started_s = time.monotonic()
        answer = cluster.run(
            "run", "--cluster", "--raw", PROMPT, "--json", "--temperature", "0.8",
            "--seed", str(SEED), "--max-tokens", str(NUM_TOKENS), timeout_s=180,
        )  # fmt: skip
        took_s = time.monotonic() - started_s
        killer.join()

        assert answer.returncode == 0, answer.stderr + cluster.logs()
        assert took_s > 3.0, "the answer was over before the worker was killed"
        assert victims[0].wait() == -signal.SIGKILL
        assert json.loads(answer.stdout)["token_ids"] == expected
