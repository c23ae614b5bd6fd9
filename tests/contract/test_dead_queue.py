"""The dead-letter queue: looking changes nothing, and what is settled is gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from shared import codec
from shared.broker.base import Broker, Outgoing
from shared.broker.memory import MemoryBroker, MemoryHub
from shared.broker.rabbitmq import RabbitmqBroker
from shared.dead_letters import DeadLetter
from shared.dead_queue import DeadQueue
from shared.errors import RequestError
from shared.messages import FinishReason, Request, SamplingParams, Step
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import LedgerRecord
from shared.topology import DEAD_QUEUE, REQUESTS_QUEUE, control_queues

WAIT_S = 10.0
SAMPLING = SamplingParams(seed=3, max_tokens=8)
POISON = Step(
    request_id="r-poison",
    model_id="m",
    layout_id="even2",
    group=1,
    epoch=0,
    position=4,
    sample=True,
    max_position=20,
    tensors={"hidden": np.zeros((1, 8), np.float32)},
    sampling=SAMPLING,
)
RECORD = LedgerRecord(
    request_id="r-poison",
    model_id="m",
    layout_id="even2",
    prompt_token_ids=(1, 2, 3, 4),
    sampling=SAMPLING,
    max_position=20,
)


@pytest.fixture(params=["memory", pytest.param("rabbitmq", marks=pytest.mark.servers)])
def broker(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker whose dead-letter and request queues are empty."""
    broker: Broker
    if request.param == "memory":
        broker = MemoryBroker(MemoryHub())
    else:
        broker = RabbitmqBroker.connect(request.getfixturevalue("amqp_url"))
    with closing(broker):  # type: ignore[type-var]
        broker.declare(control_queues())
        for queue in (DEAD_QUEUE, REQUESTS_QUEUE):
            drain(broker, queue)
        yield broker
        drain(broker, REQUESTS_QUEUE)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with closing(connect("memory://")) as stores:
        yield Ledger(stores.meta)


@pytest.fixture
def letters(broker: Broker, ledger: Ledger) -> DeadQueue:
    return DeadQueue(broker, ledger, draw_id=lambda: "r-again")


def drain(broker: Broker, queue: str) -> list[bytes]:
    bodies = []
    broker.consume(queue, prefetch=100)
    while (delivery := broker.take(WAIT_S if (broker.depth(queue) or 0) else 0.2)) is not None:
        bodies.append(delivery.body)
        broker.ack(delivery)
    broker.cancel(queue)
    return bodies


def bury(broker: Broker, *bodies: bytes) -> None:
    broker.publish([Outgoing(DEAD_QUEUE, body, persistent=True) for body in bodies]).wait(WAIT_S)


def test_looking_shows_every_letter_and_takes_none(
    broker: Broker, letters: DeadQueue, ledger: Ledger
) -> None:
    ledger.admit(RECORD)
    ledger.finish("r-poison", FinishReason.ERROR, "the kernel refuses it")
    request = Request(request_id="r-asked", prompt="hello")
    bury(broker, codec.encode(POISON), b"\x93garbage", codec.encode(request))

    first, again = letters.letters(), letters.letters()

    assert [letter.kind for letter in first] == ["step", "garbage", "request"]
    assert (first[0].request_id, first[0].group, first[0].position) == ("r-poison", 1, 4)
    assert first[0].error == "the kernel refuses it"
    assert first[1].problem
    assert first[2].request_id == "r-asked"
    assert {letter.letter_id for letter in again} == {letter.letter_id for letter in first}


def test_a_letter_tells_how_it_died(broker: Broker, letters: DeadQueue) -> None:
    died = DeadLetter(
        reason="killed 3 workers", request_id="r-poison", group=1, attempts=3, workers=("a", "b")
    )
    letter = Outgoing(DEAD_QUEUE, b"anything", persistent=True, headers=died.headers())
    broker.publish([letter]).wait(WAIT_S)

    (found,) = letters.letters()

    assert (found.history.reason, found.history.attempts) == ("killed 3 workers", 3)
    assert found.history.workers == ("a", "b")
    assert found.request_id == "r-poison"


def test_a_retried_step_asks_its_request_again_under_a_new_id(
    broker: Broker, letters: DeadQueue, ledger: Ledger
) -> None:
    ledger.admit(RECORD)
    bury(broker, codec.encode(POISON))

    request_id = letters.retry(letters.letters()[0].letter_id)

    asked = codec.decode(drain(broker, REQUESTS_QUEUE)[0])
    assert request_id == "r-again"
    assert asked == Request(
        request_id="r-again", token_ids=(1, 2, 3, 4), model="m", sampling=SAMPLING
    )
    assert letters.letters() == []


@pytest.mark.parametrize("body", [b"\x93garbage", codec.encode(POISON)])
def test_what_nothing_can_be_asked_from_stays_in_the_queue(
    broker: Broker, letters: DeadQueue, body: bytes
) -> None:
    bury(broker, body)  # of the step there is no record

    (letter,) = letters.letters()

    with pytest.raises(RequestError) as raised:
        letters.retry(letter.letter_id)

    assert raised.value.remedy == f"drop it: cellpipe dead purge {letter.letter_id}"
    assert len(letters.letters()) == 1
    assert drain(broker, REQUESTS_QUEUE) == []


def test_purging_drops_the_one_that_is_named_or_all(broker: Broker, letters: DeadQueue) -> None:
    bury(broker, b"one", b"two", b"three")
    second = letters.letters()[1]

    assert letters.purge(second.letter_id) == 1
    assert sorted(letter.body for letter in letters.letters()) == [b"one", b"three"]
    assert letters.purge() == 2
    assert letters.letters() == []


def test_an_unknown_letter_is_named(broker: Broker, letters: DeadQueue) -> None:
    bury(broker, b"one")

    with pytest.raises(RequestError, match="0000"):
        letters.purge("0000")

    assert len(letters.letters()) == 1
