"""Answers with a form from a real model: the same tokens in every cut, and whoever is killed."""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from services.embedded import Engine
from services.loader.packed import PackedModel, open_packed
from shared.broker.rabbitmq import RabbitmqBroker
from shared.messages import FinishReason, Request, SamplingParams
from shared.model.backend import pick_backend
from shared.producer import Producer, new_request_id
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent
from shared.text.document import read_text_document
from shared.text.response_format import ResponseFormat, json_format
from tests.processes import ProcessCluster

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(240)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {
            "type": "array",
            "items": {"type": "string", "maxLength": 30},
            "minItems": 2,
            "maxItems": 4,
        },
        "email": {"type": "string", "format": "email", "maxLength": 40},
    },
    "required": ["name", "age", "hobbies", "email"],
    "additionalProperties": False,
}
PROMPT = "A person as JSON, with name, age, hobbies and email:\n"
GREEDY = SamplingParams(seed=0, max_tokens=300)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=300)
KILLED_AFTER = 12


@pytest.fixture(scope="module")
def packed(real_model_path: Path) -> PackedModel:
    return open_packed(real_model_path, real_model_path.parent)


@pytest.fixture(scope="module")
def person() -> ResponseFormat:
    return json_format(PERSON, "response_format")


@pytest.fixture(scope="module")
def expected(packed: PackedModel, person: ResponseFormat) -> list[list[int]]:
    """Of one group that guesses nothing."""
    with Engine(packed.manifest, packed.read_shard, pick_backend()) as engine:
        return [
            ask(engine.producer, text_tokens(packed), replace(params, speculation=False), person)
            for params in (GREEDY, SAMPLED)
        ]


def text_tokens(packed: PackedModel) -> tuple[int, ...]:
    tokenizer, _ = read_text_document(bytes(packed.read_shard("tokenizer")))
    return tuple(tokenizer.encode(PROMPT, parse_special=False))


def ask(
    producer: Producer,
    prompt: tuple[int, ...],
    params: SamplingParams,
    wanted: ResponseFormat,
    each: Any = None,
) -> list[int]:
    """The tokens of an answer that has ended by itself; `each` is called after every token."""
    request = Request(
        request_id=new_request_id(), token_ids=prompt, sampling=params, response_format=wanted
    )
    producer.submit(request)
    tokens: list[int] = []
    for event in producer.events(request.request_id, silence_s=60):
        if isinstance(event, FinalEvent):
            assert event.finish_reason is FinishReason.STOP, event.error
            return tokens
        tokens.append(event.token_id)
        if each is not None:
            each(len(tokens))
    raise AssertionError("no end came")


def test_answers_validate(packed: PackedModel, expected: list[list[int]]) -> None:
    tokenizer, _ = read_text_document(bytes(packed.read_shard("tokenizer")))

    for tokens in expected:
        jsonschema.validate(json.loads(tokenizer.decode(tokens)), PERSON)
    assert expected[0] != expected[1]


@pytest.mark.parametrize("num_groups", [1, 3])
def test_guessing_ahead_and_groups_change_no_token(
    packed: PackedModel, person: ResponseFormat, expected: list[list[int]], num_groups: int
) -> None:
    prompt = text_tokens(packed)
    with Engine(
        packed.manifest, packed.read_shard, pick_backend(), num_groups=num_groups
    ) as engine:
        found = [ask(engine.producer, prompt, params, person) for params in (GREEDY, SAMPLED)]

    assert found == expected


@pytest.mark.servers
def test_killing_the_worker_that_draws_changes_no_token(
    amqp_url: str,
    fresh_redis_url: str,
    packed: PackedModel,
    real_model_path: Path,
    person: ResponseFormat,
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    prompt = text_tokens(packed)
    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        loaded = cluster.run("load", str(real_model_path), "--groups", "3")
        assert loaded.returncode == 0, loaded.stderr
        for group in range(2):
            cluster.start("worker", "--group", str(group))
        first = cluster.start("worker", "--group", "2", "--memory", "256MiB")
        cluster.start("scheduler")
        cluster.wait_until_serving(3)
        with (
            closing(connect(fresh_redis_url)) as stores,
            closing(RabbitmqBroker.connect(amqp_url)) as broker,
        ):
            producer = Producer(broker, Ledger(stores.meta))
            whole = ask(producer, prompt, SAMPLED, person)
            [last] = [w for w in cluster.status()["workers"] if w["groups"] == [2]]
            cluster.start("worker", "--group", "2")
            cluster.wait_until_serving(4)

            def kill(num_tokens: int) -> None:
                if num_tokens == KILLED_AFTER:
                    os.kill(first.pid, signal.SIGKILL)

            found = [
                ask(producer, prompt, GREEDY, person, each=kill),
                ask(producer, prompt, SAMPLED, person),
            ]

    assert found == expected
    assert whole == expected[1]
    assert last["peak_rss_bytes"] <= last["memory_bytes"]
    print(last)
