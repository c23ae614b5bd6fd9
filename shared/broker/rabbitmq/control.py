"""Declares queues and asks for their depth, one question at a time on a channel of its own.

A refused question closes its channel in AMQP; here that harms nobody else. Owns the memory of what
was declared, to repeat it. Runs within the loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pika.exceptions
import structlog

from shared.broker.rabbitmq.link import Connection, describe
from shared.errors import ConfigError
from shared.topology import QueueSpec, QueueType

log = structlog.get_logger()

NOT_FOUND = 404


@dataclass(slots=True, eq=False)
class _Question:
    """`spec` None asks for the depth of `queue`."""

    queue: str
    spec: QueueSpec | None
    answer: Future[int | None]
    is_repeat: bool = False


class Control:
    """The asking half of the publish connection."""

    def __init__(self) -> None:
        self.declared: dict[str, QueueSpec] = {}
        self._connection: Connection | None = None
        self._channel: Any = None
        self._questions: deque[_Question] = deque()  # the first one is being asked
        self._is_asking = False

    def declare(self, spec: QueueSpec, answer: Future[int | None]) -> None:
        """Create a queue. The answer is 0, or a `ConfigError` naming the queue."""
        self._questions.append(_Question(spec.name, spec, answer))
        self._ask_next()

    def depth(self, queue: str, answer: Future[int | None]) -> None:
        """The answer is the number of ready messages, or None when there is no such queue."""
        self._questions.append(_Question(queue, None, answer))
        self._ask_next()

    def link_up(self, connection: Connection, then: Callable[[], None]) -> None:
        """Repeat all declarations, before everything else that waits, and call `then`."""
        self._connection = connection
        again = [
            _Question(name, spec, Future(), is_repeat=True) for name, spec in self.declared.items()
        ]
        self._questions.extendleft(reversed(again))
        if again:
            again[-1].answer.add_done_callback(lambda _: then())
        else:
            then()
        self._ask_next()

    def link_down(self) -> None:
        self._connection = self._channel = None
        self._is_asking = False
        # The others stay, the first one too: both kinds of question may be asked twice.
        self._questions = deque(q for q in self._questions if not q.is_repeat)

    def _ask_next(self) -> None:
        if self._is_asking or self._connection is None:
            return
        while self._questions and self._questions[0].answer.cancelled():
            self._questions.popleft()
        if not self._questions:
            return
        self._is_asking = True
        if self._channel is None:
            self._connection.channel(on_open_callback=self._channel_open)
        else:
            self._ask()

    def _channel_open(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(self._channel_closed)
        self._ask()

    def _ask(self) -> None:
        question = self._questions[0]
        if question.spec is None:
            self._channel.queue_declare(question.queue, passive=True, callback=self._answered)
        else:
            self._channel.queue_declare(
                question.queue,
                durable=True,
                arguments=queue_arguments(question.spec),
                callback=self._answered,
            )

    def _answered(self, frame: Any) -> None:
        question = self._questions.popleft()
        if question.spec is not None:
            self.declared[question.queue] = question.spec
        self._is_asking = False
        resolve(question.answer, int(frame.method.message_count))
        self._ask_next()

    def _channel_closed(self, channel: Any, error: BaseException) -> None:
        if channel is not self._channel or self._connection is None:
            return
        self._channel = None
        if not isinstance(error, pika.exceptions.ChannelClosedByBroker):
            return  # the connection is going down; link_down follows
        self._is_asking = False
        question = self._questions.popleft()
        if question.spec is None and error.reply_code == NOT_FOUND:
            resolve(question.answer, None)
        else:
            log.warning("queue_refused", queue=question.queue, reason=describe(error))
            refusal = ConfigError(
                f"queue {question.queue} cannot be declared: {describe(error)}",
                remedy="it exists with other arguments: delete it, or use another virtual host",
            )
            refuse(question.answer, refusal)
        self._ask_next()


def queue_arguments(spec: QueueSpec) -> dict[str, str | int]:
    """The `x-` arguments of a queue; https://www.rabbitmq.com/docs/queues#optional-arguments."""
    arguments: dict[str, str | int] = {"x-queue-type": spec.queue_type.value}
    if spec.max_length is not None:
        arguments |= {"x-max-length": spec.max_length, "x-overflow": "reject-publish"}
    if spec.max_bytes is not None:
        arguments |= {"x-max-length-bytes": spec.max_bytes, "x-overflow": "reject-publish"}
    if spec.dead_letter_queue is not None:
        arguments |= {
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": spec.dead_letter_queue,
        }
    if spec.delivery_limit is not None and spec.queue_type is QueueType.QUORUM:
        arguments["x-delivery-limit"] = spec.delivery_limit
    if spec.message_ttl_ms is not None:
        arguments["x-message-ttl"] = spec.message_ttl_ms
    if spec.expires_ms is not None:
        arguments["x-expires"] = spec.expires_ms
    return arguments


def resolve(answer: Future[Any], value: Any) -> None:
    """Give an answer, unless there is one, or nobody waits for it any more."""
    if not answer.done() and answer.set_running_or_notify_cancel():
        answer.set_result(value)


def refuse(answer: Future[Any], error: Exception) -> None:
    """Like `resolve`, with an error for the one who waits."""
    if not answer.done() and answer.set_running_or_notify_cancel():
        answer.set_exception(error)
