"""Looks into the dead-letter queue, and settles what lies there. Knows no worker and no kernel.

A letter stays until somebody retries or purges it: whoever only looks gives all of them back. Its
id is made from its body, so that it is the same the next time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from shared import codec
from shared.broker.base import Broker, Delivery, Outgoing
from shared.dead_letters import DeadLetter
from shared.errors import DecodeError, PermanentError, RequestError
from shared.messages import Request, Step
from shared.producer import hand_over, new_request_id
from shared.store.ledger_base import RequestLedger
from shared.topology import DEAD_QUEUE, REQUESTS_QUEUE, control_queues

MAX_LETTERS = 1_000  # at a time: a look must not fill memory
FIRST_TAKE_S = 5.0
NEXT_TAKE_S = 1.0
CONFIRM_S = 10.0
DEPTH_LOOK_S = 0.05
MAX_DEPTH_LOOKS = 20


@dataclass(frozen=True, slots=True)
class Letter:
    """What was given up. `kind` is its wire kind, or "garbage"; `problem` says why it is garbage.

    `error` is what its request ended with, "" when that is not known (any more), and `history` what
    is written on the letter of how it died.
    """

    letter_id: str
    kind: str
    request_id: str
    num_bytes: int
    group: int | None = None
    position: int | None = None
    problem: str = ""
    error: str = ""
    history: DeadLetter = field(default_factory=lambda: DeadLetter(""))
    body: bytes = field(default=b"", repr=False)


class DeadQueue:
    """The dead-letter queue of a cluster. Sees the oldest `MAX_LETTERS`."""

    def __init__(
        self, broker: Broker, ledger: RequestLedger, *, draw_id: Callable[[], str] = new_request_id
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._draw_id = draw_id
        broker.declare(control_queues())

    def letters(self) -> list[Letter]:
        """All letters, the oldest first; they stay where they are."""
        with self._held() as deliveries:
            return self._read(deliveries)

    def retry(self, letter_id: str) -> str:
        """Ask what a letter's request asked once more, under a new id, which is returned.

        The old request has ended and stays ended. Raises `RequestError` for an unknown letter and
        for one from which nothing can be asked, `Overloaded` when the request queue is full.
        """
        with self._held() as deliveries:
            delivery = _find(deliveries, letter_id)[0]
            request = self._request_in(delivery, letter_id)
            outgoing = Outgoing(
                REQUESTS_QUEUE,
                codec.encode(request),
                persistent=True,
                correlation_id=delivery.correlation_id,
                reply_to=delivery.reply_to,
            )
            hand_over(self._broker, outgoing, CONFIRM_S)
            self._settle(deliveries, delivery)  # a crash above leaves the letter
            return request.request_id

    def purge(self, letter_id: str = "") -> int:
        """Drop a letter, or, with "", all that are seen; how many that were.

        Raises `RequestError` for an unknown letter.
        """
        with self._held() as deliveries:
            doomed = _find(deliveries, letter_id) if letter_id else list(deliveries)
            for delivery in doomed:
                self._settle(deliveries, delivery)
            return len(doomed)

    @contextmanager
    def _held(self) -> Iterator[list[Delivery]]:
        """The letters, unsettled; those that are still in the list at the end go back."""
        waiting = min(self._settled_depth(), MAX_LETTERS)
        deliveries: list[Delivery] = []
        if not waiting:
            yield deliveries
            return
        self._broker.consume(DEAD_QUEUE, prefetch=waiting)
        try:
            while len(deliveries) < waiting:
                # Somebody else may be looking at the others.
                delivery = self._broker.take(NEXT_TAKE_S if deliveries else FIRST_TAKE_S)
                if delivery is None:
                    break
                deliveries.append(delivery)
            yield deliveries
        finally:
            for delivery in deliveries:
                self._broker.reject(delivery, requeue=True)
            self._broker.cancel(DEAD_QUEUE)

    def _settled_depth(self) -> int:
        """How many letters there are, once what an earlier look gave back has arrived."""
        depth = -1
        for _ in range(MAX_DEPTH_LOOKS):
            before, depth = depth, self._broker.depth(DEAD_QUEUE) or 0
            if depth == before:
                break
            time.sleep(DEPTH_LOOK_S)
        return depth

    def _settle(self, deliveries: list[Delivery], delivery: Delivery) -> None:
        self._broker.ack(delivery)
        deliveries.remove(delivery)

    def _read(self, deliveries: Sequence[Delivery]) -> list[Letter]:
        letters = [_read_letter(delivery) for delivery in deliveries]
        states = self._ledger.states({letter.request_id for letter in letters if letter.request_id})
        return [
            replace(letter, error=states[letter.request_id].error)
            if letter.request_id in states
            else letter
            for letter in letters
        ]

    def _request_in(self, delivery: Delivery, letter_id: str) -> Request:
        drop = f"drop it: cellpipe dead purge {letter_id}"
        try:
            message = codec.decode(delivery.body, delivery.content_type)
        except PermanentError as error:
            raise RequestError(
                f"this letter is no message, and nothing can be asked again: {error}",
                remedy=drop,
            ) from error
        if isinstance(message, Request):
            return replace(message, request_id=self._draw_id(), deadline_unix_ms=0)
        record = self._ledger.get(message.request_id)
        if record is None:
            raise RequestError(
                f"the record of request {message.request_id} is gone, and its prompt with it",
                remedy=drop,
            )
        return Request(
            request_id=self._draw_id(),
            token_ids=record.prompt_token_ids,
            model=record.model_id,
            sampling=record.sampling,
        )


def _find(deliveries: Sequence[Delivery], letter_id: str) -> list[Delivery]:
    found = [delivery for delivery in deliveries if _letter_id(delivery) == letter_id]
    if not found:
        raise RequestError(
            f"no dead letter {letter_id!r:.80}", remedy="see what there is: cellpipe dead list"
        )
    return found


def _letter_id(delivery: Delivery) -> str:
    return hashlib.sha256(delivery.body).hexdigest()[:10]


def _read_letter(delivery: Delivery) -> Letter:
    history = DeadLetter.of(delivery)
    letter = Letter(
        letter_id=_letter_id(delivery),
        kind="garbage",
        request_id=history.request_id or codec.request_id_of(delivery.body, delivery.content_type),
        num_bytes=len(delivery.body),
        history=history,
        body=delivery.body,
    )
    try:
        message = codec.decode(delivery.body, delivery.content_type)
    except (DecodeError, RequestError) as error:
        return replace(letter, problem=str(error))
    letter = replace(letter, request_id=message.request_id, kind=type(message).__name__.lower())
    if isinstance(message, Step):
        return replace(letter, group=message.group, position=message.position)
    return letter
