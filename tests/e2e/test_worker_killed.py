"""A worker that dies takes nothing with it."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path

import pytest

from services.chaos.reference import ReferenceModel
from services.loader.packed import open_packed
from shared.broker.rabbitmq import RabbitmqBroker
from shared.messages import Request, SamplingParams
from shared.producer import Producer, new_request_id
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent
from shared.text.document import read_text_document
from tests.processes import ProcessCluster

pytestmark = [pytest.mark.real_model, pytest.mark.servers, pytest.mark.timeout(240)]

PROMPT = "Once upon a time there was a small machine that"
NUM_TOKENS = 200
KILLED_AFTER = 60
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
        cluster.load(real_model_path, groups=2)
        victims = [cluster.start("worker", "--group", "1") for _ in range(2)]
        for _ in range(2):
            cluster.start("worker", "--group", "0")
        cluster.start("scheduler")
        cluster.wait_until_serving(4)
        cpu_before_s = [cpu_seconds(victim.pid) for victim in victims]
        tokens: list[int] = []
        with (
            closing(connect(fresh_redis_url)) as stores,
            closing(RabbitmqBroker.connect(amqp_url)) as broker,
        ):
            producer = Producer(broker, Ledger(stores.meta))
            request = Request(request_id=new_request_id(), token_ids=tuple(prompt), sampling=params)
            producer.submit(request)
            for event in producer.events(request.request_id, silence_s=60):
                if isinstance(event, FinalEvent):
                    break
                tokens.append(event.token_id)
                if len(tokens) == KILLED_AFTER:  # whoever holds its rows has computed the most
                    used_s = [
                        cpu_seconds(v.pid) - b for v, b in zip(victims, cpu_before_s, strict=True)
                    ]
                    os.kill(victims[used_s.index(max(used_s))].pid, signal.SIGKILL)

        assert sorted(victim.poll() is None for victim in victims) == [False, True]
        assert tokens == expected, cluster.logs()


def cpu_seconds(pid: int) -> float:
    """User time that a process has taken so far (proc(5), field 14 of stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")
