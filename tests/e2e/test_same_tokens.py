"""The tokens depend on the prompt, the sampling parameters and the seed, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from services.chaos.reference import ReferenceModel
from services.embedded import Engine
from services.loader.packed import PackedModel, open_packed
from shared.messages import Request, SamplingParams
from shared.model.backend import pick_backend
from shared.producer import new_request_id
from shared.store.ledger_types import TokenEvent
from shared.text.document import read_text_document
from shared.topology import Wire, even_layout
from tests.cluster import ThreadCluster

pytestmark = pytest.mark.real_model

PROMPT = "The three primary colours are"
REPETITIVE = "one two three four five six seven eight nine ten, " * 3
GREEDY = SamplingParams(seed=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=7, max_tokens=24,
                         ignore_eos=True)  # fmt: skip
SHAPED = replace(GREEDY, frequency_penalty=0.4, presence_penalty=-0.2, repetition_penalty=1.15,
                 logit_bias=((260, 3.0), (282, -100.0)))  # fmt: skip
WANDERING = replace(SAMPLED, min_p=0.02, frequency_penalty=0.3, repetition_penalty=1.05)
ASKED = (GREEDY, SAMPLED, SHAPED, WANDERING)

Ask = Callable[[SamplingParams], list[int]]


@pytest.fixture(scope="module")
def packed(real_model_path: Path) -> PackedModel:
    return open_packed(real_model_path, real_model_path.parent)


@pytest.fixture(scope="module")
def prompt(packed: PackedModel) -> list[int]:
    tokenizer, _ = read_text_document(bytes(packed.read_shard("tokenizer")))
    return tokenizer.encode(PROMPT, parse_special=False)


@pytest.fixture(scope="module")
def expected(packed: PackedModel, prompt: list[int]) -> list[list[int]]:
    reference = ReferenceModel(packed.manifest, packed.read_shard)
    return [reference.generate(prompt, params) for params in ASKED]


@pytest.mark.parametrize("num_groups", [1, 3, 30])
@pytest.mark.parametrize("workers_per_group", [1, 2])
def test_embedded_pipeline_equals_the_reference(
    packed: PackedModel,
    prompt: list[int],
    expected: list[list[int]],
    num_groups: int,
    workers_per_group: int,
) -> None:
    with Engine(
        packed.manifest,
        packed.read_shard,
        pick_backend(),
        num_groups=num_groups,
        workers_per_group=workers_per_group,
    ) as engine:
        answers = [_ask_engine(engine, prompt, params) for params in ASKED]

    assert answers == expected


@pytest.mark.servers
@pytest.mark.parametrize("num_groups", [1, 3, 30])
@pytest.mark.parametrize("workers_per_group", [1, 2])
def test_cluster_equals_the_reference(
    amqp_url: str,
    fresh_redis_url: str,
    packed: PackedModel,
    prompt: list[int],
    expected: list[list[int]],
    num_groups: int,
    workers_per_group: int,
) -> None:
    with ThreadCluster(
        amqp_url,
        fresh_redis_url,
        packed,
        num_groups=num_groups,
        workers_per_group=workers_per_group,
    ) as cluster:
        asked = ASKED[: 2 if num_groups == 30 else None]  # a token takes thirty hops there
        answers = [cluster.ask(prompt, params)[0] for params in asked]

    assert answers == expected[: len(asked)]


@pytest.mark.servers
@pytest.mark.parametrize("wire", [Wire.F16, Wire.I8])
def test_clusters_of_a_layout_with_a_shorter_wire_agree(
    amqp_url: str,
    fresh_redis_url: str,
    packed: PackedModel,
    prompt: list[int],
    expected: list[list[int]],
    wire: Wire,
) -> None:
    manifest = packed.manifest
    layout = even_layout(manifest.model_id, manifest.config["num_hidden_layers"], 3, wire=wire)
    reference = ReferenceModel(manifest, packed.read_shard, layout=layout)
    wanted = reference.generate_all([(prompt, params) for params in ASKED])
    with ThreadCluster(
        amqp_url, fresh_redis_url, packed, num_groups=3, workers_per_group=2, wire=wire
    ) as cluster:
        answers = [cluster.ask(prompt, params)[0] for params in ASKED]
    with Engine(manifest, packed.read_shard, pick_backend(), num_groups=3, wire=wire) as engine:
        embedded = [_ask_engine(engine, prompt, params) for params in ASKED]

    assert answers == embedded == wanted
    assert wanted != expected  # the rounding shows in these answers, so that a missed hop would


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.3])
@pytest.mark.parametrize("frequency_penalty", [0.0, -0.2])
def test_a_text_that_repeats_itself_takes_fewer_steps_and_has_the_same_tokens(
    packed: PackedModel, num_groups: int, temperature: float, frequency_penalty: float
) -> None:
    tokenizer, _ = read_text_document(bytes(packed.read_shard("tokenizer")))
    prompt = tokenizer.encode(REPETITIVE, parse_special=False)
    params = replace(
        GREEDY, temperature=temperature, max_tokens=48, frequency_penalty=frequency_penalty
    )
    expected = ReferenceModel(packed.manifest, packed.read_shard).generate(prompt, params)
    with Engine(
        packed.manifest, packed.read_shard, pick_backend(), num_groups=num_groups
    ) as engine:
        plain = _ask_engine(engine, prompt, replace(params, speculation=False))
        num_plain_steps = engine.workers[-1].num_steps_done
        speculated = _ask_engine(engine, prompt, params)
        num_steps = engine.workers[-1].num_steps_done - num_plain_steps

    assert plain == speculated == expected
    assert num_plain_steps >= 48
    assert num_steps < 36


@pytest.mark.servers
@pytest.mark.parametrize("workers_per_group", [1, 2])
def test_a_cluster_that_speculates_has_the_same_tokens(
    amqp_url: str, fresh_redis_url: str, packed: PackedModel, workers_per_group: int
) -> None:
    tokenizer, _ = read_text_document(bytes(packed.read_shard("tokenizer")))
    prompt = tokenizer.encode(REPETITIVE, parse_special=False)
    asked = [
        replace(params, max_tokens=48) for params in (GREEDY, replace(SAMPLED, seed=3), SHAPED)
    ]
    reference = ReferenceModel(packed.manifest, packed.read_shard)
    expected = reference.generate_all([(prompt, params) for params in asked])
    with ThreadCluster(
        amqp_url, fresh_redis_url, packed, num_groups=3, workers_per_group=workers_per_group
    ) as cluster:
        answers = [cluster.ask(prompt, params)[0] for params in asked]

    assert answers == expected


def test_greedy_and_sampled_answers_differ(expected: list[list[int]]) -> None:
    assert len(set(map(tuple, expected))) == len(ASKED)


def _ask_engine(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    request_id = new_request_id()
    engine.producer.submit(Request(request_id=request_id, token_ids=tuple(prompt), sampling=params))
    events = engine.producer.events(request_id, silence_s=60, on_silence=engine.check)
    return [event.token_id for event in events if isinstance(event, TokenEvent)]
