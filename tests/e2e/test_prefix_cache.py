"""What a prompt begins with is computed once, for all that begin alike and across restarts."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from services.chaos.reference import ReferenceModel
from services.embedded import Engine
from services.loader.packed import PackedModel, open_packed
from shared.broker.rabbitmq import RabbitmqBroker
from shared.messages import ChatMessage, Request, SamplingParams
from shared.model.backend import pick_backend
from shared.producer import Producer, new_request_id
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent
from shared.text.document import read_text_document
from shared.text.tokenizer import Tokenizer
from tests.processes import ProcessCluster

pytestmark = [pytest.mark.real_model, pytest.mark.servers, pytest.mark.timeout(300)]

NUM_SHARED = 1_000  # tokens of a system prompt
SAMPLING = SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True)
RULES = "Rule {}: answer in short words, name the colour of machine {} and never that of another. "
QUESTIONS = (
    "What is the colour of the sky?",
    "Who are you?",
    "Count to ten.",
    "Name a river.",
    "Why?",
)


@dataclass(frozen=True)
class Answered:
    tokens: list[int]
    num_cached: int
    first_token_s: float


@pytest.fixture(scope="module")
def packed(real_model_path: Path) -> PackedModel:
    return open_packed(real_model_path, real_model_path.parent)


@pytest.fixture(scope="module")
def tokenizer(packed: PackedModel) -> Tokenizer:
    return read_text_document(bytes(packed.read_shard("tokenizer")))[0]


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """One for each question, all with the same 1,000 tokens before it."""
    rules = "".join(RULES.format(number, number) for number in range(100))
    shared = tokenizer.encode(rules, parse_special=False)[:NUM_SHARED]
    assert len(shared) == NUM_SHARED
    return [shared + tokenizer.encode(q, parse_special=False) for q in QUESTIONS]


@contextmanager
def producer_to(amqp_url: str, redis_url: str) -> Iterator[Producer]:
    with (
        closing(connect(redis_url)) as stores,
        closing(RabbitmqBroker.connect(amqp_url)) as broker,
    ):
        yield Producer(broker, Ledger(stores.meta))


def ask(producer: Producer, prompt: list[int]) -> Answered:
    request = Request(new_request_id(), token_ids=tuple(prompt), sampling=SAMPLING)
    started_s = time.perf_counter()
    producer.submit(request)
    tokens: list[int] = []
    first_token_s = 0.0
    for event in producer.events(request.request_id, silence_s=60):
        if isinstance(event, FinalEvent):
            return Answered(tokens, event.num_cached, first_token_s)
        first_token_s = first_token_s or time.perf_counter() - started_s
        tokens.append(event.token_id)
    raise AssertionError("no final event")


def test_a_shared_system_prompt_is_computed_once_also_when_every_worker_was_restarted(
    amqp_url: str,
    fresh_redis_url: str,
    real_model_path: Path,
    packed: PackedModel,
    prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    reference = ReferenceModel(packed.manifest, packed.read_shard)
    expected = [reference.generate(prompt, SAMPLING) for prompt in prompts]

    with ProcessCluster(amqp_url, fresh_redis_url, tmp_path) as cluster:
        cluster.load(real_model_path, groups=2)
        workers = [cluster.start("worker", "--group", str(group)) for group in (0, 1)]
        cluster.start("scheduler")
        cluster.wait_until_serving(2)
        with producer_to(amqp_url, fresh_redis_url) as producer:
            first, *then = [ask(producer, prompt) for prompt in prompts[:3]]
            for worker in workers:
                worker.send_signal(signal.SIGTERM)
            for worker in workers:
                worker.wait(timeout=15)
            for group in (0, 1):
                cluster.start("worker", "--group", str(group))
            cluster.wait_until_serving(2)
            restarted = [ask(producer, prompt) for prompt in prompts[3:]]

    answers = [first, *then, *restarted]
    print([(a.num_cached, round(a.first_token_s * 1e3)) for a in answers])
    assert [answer.tokens for answer in answers] == expected
    assert [answer.num_cached for answer in answers] == [0, 992, 992, 992, 992]
    for later in (then, restarted):  # of two, as the machine may be busy with other things
        assert min(a.first_token_s for a in later) <= 0.25 * first.first_token_s


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_second_turn_of_an_embedded_chat_computes_only_what_is_new(
    packed: PackedModel, num_groups: int
) -> None:
    turns = [ChatMessage("user", "Name three rivers of Europe, and say where each begins.")]
    sampling = SamplingParams(seed=0, max_tokens=40)
    answers = []
    with Engine(packed.manifest, packed.read_shard, pick_backend(), num_groups=num_groups) as chat:
        for question in ("And which of them is the longest?", None):
            request = Request(new_request_id(), messages=tuple(turns), sampling=sampling)
            chat.producer.submit(request)
            tokens = []
            for event in chat.producer.events(
                request.request_id, silence_s=60, on_silence=chat.check
            ):
                if isinstance(event, FinalEvent):
                    answers.append((event, tokens))
                else:
                    tokens.append(event.token_id)
            turns.append(ChatMessage("assistant", chat.tokenizer.decode(tokens, skip_special=True)))
            turns.append(ChatMessage("user", question or ""))

    (first, said), (second, _) = answers
    assert first.num_cached == 0
    before = first.num_prompt_tokens + len(said) - 1  # the last token was never fed back
    assert second.num_cached >= before - 16  # at most one page, which was not full
