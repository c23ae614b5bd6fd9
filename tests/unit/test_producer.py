"""What a producer says, also when the pipeline says nothing."""

from __future__ import annotations

import doctest
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import shared.producer
from services.cli.tree import EXIT_OVERLOADED, exit_code_of
from services.embedded import Engine
from services.loader.packed import open_packed
from shared.broker.memory import MemoryBroker, MemoryHub
from shared.errors import Overloaded, PermanentError, RequestError, StoreDamaged, TransientError
from shared.messages import FinishReason, Request, SamplingParams
from shared.model.backend import pick_backend
from shared.producer import DEADLINE_GRACE_MS, Producer
from shared.store import keys
from shared.topology import BATCH_QUEUE, REQUESTS_QUEUE, QueueSpec, control_queues
from tests.gguf_files import write_gguf
from tests.rig import Rig
from tests.rig_model import GREEDY, expected_tokens, prompt_of, rig_tokenizer


def make_producer(rig: Rig) -> Producer:
    return Producer(rig.new_broker(), rig.ledger, tokenizer=rig_tokenizer())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    packed = open_packed(write_gguf(tmp_path / "tiny.gguf"), tmp_path)
    with Engine(packed.manifest, packed.read_shard, pick_backend()) as engine:
        yield engine


def test_the_example_in_the_docstring_is_true(engine: Engine) -> None:
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(shared.producer, extraglobs={"producer": engine.producer})

    with capture_logs():  # those of the engine's threads would come between
        failed, attempted = doctest.DocTestRunner().run(example)

    assert attempted >= 7
    assert failed == 0


def test_a_result_is_the_whole_answer_and_can_be_asked_for_again() -> None:
    rig = Rig(1)
    rig.add_worker(0)
    rig.add_scheduler()
    producer = make_producer(rig)
    prompt = prompt_of(5)
    request_id = producer.submit(Request("r", token_ids=prompt, sampling=GREEDY))
    with pytest.raises(TransientError, match="not known"):
        producer.result(request_id, timeout_s=0)
    rig.run_until(lambda: len(rig.tokens("r")) == 3)
    with pytest.raises(TransientError, match="runs, and has 3 tokens"):
        producer.result(request_id, timeout_s=0)
    rig.run_until_done("r")

    first, second = producer.result(request_id), producer.result(request_id)

    assert first == second
    assert list(first.token_ids) == expected_tokens(prompt, GREEDY)
    assert first.text == rig_tokenizer().decode(first.token_ids, skip_special=True)
    assert "".join(producer.stream(request_id)) == first.text
    assert (first.finish_reason, first.num_prompt_tokens) == (FinishReason.LENGTH, 5)


def test_a_refused_request_says_why_in_result_and_stream() -> None:
    rig = Rig(1)
    rig.add_scheduler()
    producer = make_producer(rig)
    producer.submit(Request("r", prompt="hello", model="another"))
    rig.run_until_quiet()

    reply = producer.result("r")

    assert reply.finish_reason is FinishReason.ERROR
    assert "'another' is not served" in reply.error
    with pytest.raises(PermanentError, match="'another' is not served"):
        list(producer.stream("r"))


def test_a_cancelled_stream_ends_with_what_there_is() -> None:
    rig = Rig(1)
    rig.add_worker(0)
    rig.add_scheduler()
    producer = make_producer(rig)
    producer.submit(Request("r", token_ids=prompt_of(5), sampling=GREEDY))
    rig.run_until(lambda: len(rig.tokens("r")) == 4)

    producer.cancel("r")

    text = rig_tokenizer().decode(expected_tokens(prompt_of(5), GREEDY)[:4], skip_special=True)
    assert "".join(producer.stream("r")) == text
    assert producer.result("r").finish_reason is FinishReason.ABORT


def test_a_request_that_waits_in_its_queue_is_cancelled_and_never_runs() -> None:
    rig = Rig(1)
    producer = make_producer(rig)
    rig.open_reply_queue("mine")
    rig.submit(Request("r", token_ids=prompt_of(5), sampling=GREEDY), reply_to="mine")

    producer.cancel("r", is_submitted=True)

    assert list(producer.stream("r")) == []
    assert producer.result("r").finish_reason is FinishReason.ABORT
    worker = rig.add_worker(0)
    rig.add_scheduler()
    rig.run_until_quiet()
    (reply,) = rig.replies("mine")
    assert (reply.finish_reason, reply.token_ids) == (FinishReason.ABORT, ())
    assert worker.num_steps_done == 0


def test_an_unknown_request_cannot_be_cancelled() -> None:
    with pytest.raises(RequestError, match="not known"):
        make_producer(Rig(1)).cancel("r")


def test_lost_tokens_are_no_answer() -> None:
    rig = Rig(1)
    rig.add_worker(0)
    rig.add_scheduler()
    producer = make_producer(rig)
    producer.submit(Request("r", token_ids=prompt_of(5), sampling=GREEDY))
    rig.run_until_quiet()
    events = rig.ledger.events("r")
    rig.stores.meta.run(("XDEL", keys.events("r"), events[2].event_id))

    with pytest.raises(StoreDamaged, match="11 of the 12 tokens"):
        producer.result("r")


def test_a_request_of_a_batch_goes_to_its_own_queue() -> None:
    broker = MemoryBroker(MemoryHub())
    broker.declare(control_queues())
    producer = Producer(broker, Rig(1).ledger)

    producer.submit(Request("r", prompt="a", sampling=SamplingParams()), batch=True)

    assert (broker.depth(BATCH_QUEUE), broker.depth(REQUESTS_QUEUE)) == (1, 0)


def test_an_end_that_does_not_come_is_given_up_after_the_deadline() -> None:
    producer = make_producer(Rig(1))
    deadline_unix_ms = time.time_ns() // 1_000_000 - DEADLINE_GRACE_MS - 1

    with pytest.raises(TransientError, match="deadline of request r"):
        next(producer.events("r", silence_s=0.001, deadline_unix_ms=deadline_unix_ms))


def test_a_request_that_is_too_large_is_refused_by_size() -> None:
    producer = make_producer(Rig(1))

    with pytest.raises(RequestError, match="over the limit"):
        producer.submit(Request("r", prompt="a" * (8 << 20)))


def test_a_full_queue_refuses_by_name_and_says_when_to_come_again() -> None:
    broker = MemoryBroker(MemoryHub())
    broker.declare([QueueSpec(REQUESTS_QUEUE, max_length=1)])
    producer = Producer(broker, Rig(1).ledger)
    producer.submit(Request("first", prompt="a"))

    with pytest.raises(Overloaded, match="no more requests for now") as raised:
        producer.submit(Request("second", prompt="a"))

    assert raised.value.retry_after_s > 0
    assert "try again in 5 s" in raised.value.remedy
    assert exit_code_of(raised.value) == EXIT_OVERLOADED
    assert broker.depth(REQUESTS_QUEUE) == 1
