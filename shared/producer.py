"""Submits requests and follows their answers. Knows no worker, layout or kernel.

From a Python program, with the URLs of a cluster:

    with open_producer("amqp://broker.example/", "redis://redis.example/0") as producer: ...

and then, or with the `producer` of an embedded `Engine`:

>>> from shared.messages import Request, SamplingParams
>>> request = Request(new_request_id(), prompt="hello", sampling=SamplingParams(max_tokens=4))
>>> request_id = producer.submit(request)      # the broker has it: it will be answered
>>> pieces = list(producer.stream(request_id))  # text as it comes
>>> reply = producer.result(request_id)         # the whole answer; again, or for the first time
>>> reply.text == "".join(pieces), reply.num_prompt_tokens, len(reply.token_ids)
(True, 1, 4)
>>> producer.cancel(request_id)                 # nothing happens: it has ended
>>> producer.result("r-unknown", timeout_s=0)   # doctest: +ELLIPSIS
Traceback (most recent call last):
shared.errors.TransientError: request r-unknown is not known: it waits in its queue, or ended ...
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager

from shared import codec
from shared.broker.base import Broker, Outgoing
from shared.ended import aborted_record, reply_of, unfinished
from shared.errors import (
    ErrorCode,
    Overloaded,
    PermanentError,
    PublishRefused,
    RequestError,
    TransientError,
)
from shared.messages import FinishReason, Reply, Request
from shared.outage import OUTAGE_PATIENCE_S, OnOutage, wait_out
from shared.store.ledger import Ledger
from shared.store.ledger_base import START, RequestLedger
from shared.store.ledger_types import Event, FinalEvent, RequestState, TokenEvent
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer
from shared.topology import BATCH_QUEUE, REQUESTS_QUEUE, control_queues

DEADLINE_GRACE_MS = 10_000  # for a scheduler that waits for a server, or is replaced by another
RETRY_AFTER_S = 5.0  # a full queue takes more once a fifth of it has been served


def new_request_id() -> str:
    """A fresh request id: 96 random bits in hex, behind "r-"."""
    return f"r-{secrets.token_hex(12)}"


def hand_over(broker: Broker, request: Outgoing, timeout_s: float) -> None:
    """Publish a message to the request queue. Raises `Overloaded`, and what `Confirm.wait` does."""
    try:
        broker.publish([request]).wait(timeout_s)
    except PublishRefused as error:
        raise Overloaded(
            f"the cluster takes no more requests for now: {error}", retry_after_s=RETRY_AFTER_S
        ) from error


class Producer:
    """A connection of a user to a cluster, or to the embedded pipeline.

    `pause` is what `events` does after each read, given the request's id, so that the next one
    brings several tokens.
    `stream` and `result` need the model's `tokenizer`.
    Whoever follows an answer waits `patience_s` for a store that does not answer, and goes on where
    it was: `events`, `stream` and `result`. The others raise `StoreUnavailable` at once.
    """

    def __init__(
        self,
        broker: Broker,
        ledger: RequestLedger,
        *,
        tokenizer: Tokenizer | None = None,
        pause: Callable[[str], None] | None = None,
        patience_s: float = OUTAGE_PATIENCE_S,
    ) -> None:
        self._broker = broker
        self._ledger = ledger
        self._tokenizer = tokenizer
        self._pause = pause
        self._patience_s = patience_s

    def submit(self, request: Request, *, batch: bool = False, timeout_s: float = 10.0) -> str:
        """Hand a request over; when this returns, the broker has it and it will be answered.

        Returns its id. One of a `batch` is served when no other waits. Submitting a request again
        is safe: one that runs or has ended is not computed again.

        Raises `Overloaded` when the queue is full: then nothing was taken, and nothing will come
        of it. Raises `Unroutable` when no cluster has ever declared it, `ConfirmTimeout` or
        `BrokerUnavailable` when its fate is unknown: submit it again then. Raises `RequestError`
        for one that is too large.
        """
        body = codec.encode(request)
        if len(body) > codec.MAX_FRAME_BYTES:
            raise RequestError(
                f"the request takes {len(body)} bytes, over the limit of {codec.MAX_FRAME_BYTES}",
                remedy="send a shorter prompt",
                code=ErrorCode.CONTEXT_LENGTH,
            )
        queue = BATCH_QUEUE if batch else REQUESTS_QUEUE
        hand_over(self._broker, Outgoing(queue, body, persistent=True), timeout_s)
        return request.request_id

    def events(
        self,
        request_id: str,
        *,
        after: str = START,
        silence_s: float | None = None,
        on_silence: Callable[[], None] | None = None,
        on_outage: OnOutage | None = None,
        deadline_unix_ms: int = 0,
    ) -> Iterator[Event]:
        """Yield a request's events after the event id `after`, ending with the final one.

        Calls `on_silence` about once a second while nothing comes, and raises `TransientError`
        after `silence_s` seconds of it, or when the request's deadline is over and its end, which
        the scheduler then writes, does not come. Calls `on_outage` when the store stops answering,
        and raises `StoreUnavailable` when it does not come back in time.
        """
        heard_s = time.monotonic()
        while True:
            block_ms = 1000 if silence_s is None else max(1, min(1000, int(silence_s * 1000)))
            events = self._read(request_id, after, block_ms, self._patience_s, on_outage)
            for event in events:
                yield event
                if isinstance(event, FinalEvent):
                    return
                after = event.event_id
            if events:
                heard_s = time.monotonic()
                if self._pause is not None:
                    self._pause(request_id)
                continue
            if on_silence is not None:
                on_silence()
            if 0 < deadline_unix_ms < time.time_ns() // 1_000_000 - DEADLINE_GRACE_MS:
                raise TransientError(
                    f"the deadline of request {request_id} has passed, and nobody has ended it",
                    remedy="look at the cluster: cellpipe status",
                )
            if silence_s is not None and time.monotonic() - heard_s > silence_s:
                raise TransientError(
                    f"nothing was heard of request {request_id} for {silence_s:g} s",
                    remedy="look at the cluster: cellpipe status",
                )

    def stream(
        self,
        request_id: str,
        *,
        silence_s: float | None = None,
        on_silence: Callable[[], None] | None = None,
        on_outage: OnOutage | None = None,
    ) -> Iterator[str]:
        """Yield a request's text as it comes, in whole characters, from its beginning.

        Ends with the request, also with one that was cancelled. Raises `PermanentError` with the
        request's own error when it failed, and what `events` does.
        """
        detokenizer = Detokenizer(self._require_tokenizer())
        for event in self.events(
            request_id, silence_s=silence_s, on_silence=on_silence, on_outage=on_outage
        ):
            if isinstance(event, TokenEvent):
                text = detokenizer.feed([event.token_id])
            else:
                text = detokenizer.finish()
            if text:
                yield text
            if isinstance(event, FinalEvent) and event.finish_reason is FinishReason.ERROR:
                raise PermanentError(event.error)

    def result(
        self,
        request_id: str,
        *,
        timeout_s: float | None = None,
        on_silence: Callable[[], None] | None = None,
        on_outage: OnOutage | None = None,
    ) -> Reply:
        """The whole answer, once there is one; a failure is in its `error`.

        Waits `timeout_s` for it, None for ever. Raises `TransientError` when it has not ended by
        then, `StoreDamaged` when the store has lost tokens of it. The others are as of `events`.
        """
        tokenizer = self._require_tokenizer()
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        tokens: list[TokenEvent] = []
        after = START
        while True:
            left_s = 1.0 if give_up_s is None else give_up_s - time.monotonic()
            block_ms = max(0, min(1000, int(left_s * 1000)))
            patience_s = self._patience_s if give_up_s is None else min(left_s, self._patience_s)
            events = self._read(request_id, after, block_ms, patience_s, on_outage)
            for event in events:
                if isinstance(event, FinalEvent):
                    return reply_of(request_id, event, tokens, tokenizer)
                tokens.append(event)
                after = event.event_id
            if not events and left_s <= 0:
                raise unfinished(request_id, len(tokens), is_known=bool(self.states([request_id])))
            if not events and on_silence is not None:
                on_silence()

    def new_events(self, after: Mapping[str, str], *, wait_ms: int = 0) -> dict[str, list[Event]]:
        """What has come of several requests after an event of each.

        Waits up to `wait_ms` for the first of them, 0 not at all.
        """
        return self._ledger.events_of(after, wait_ms)

    def states(self, request_ids: Iterable[str]) -> dict[str, RequestState]:
        """How far those requests are that a scheduler has admitted, in one round trip."""
        return self._ledger.states(request_ids)

    def cancel(
        self,
        request_id: str,
        *,
        is_submitted: bool = False,
        reason: FinishReason = FinishReason.ABORT,
    ) -> None:
        """End a request from outside; nothing happens if it has ended.

        The `reason` is STOP for one whose text is whole, since a stop string has ended it.

        Raises `RequestError` if no scheduler has admitted it (yet), unless `is_submitted` says that
        it was handed over: then it ends in its queue.
        """
        if self._ledger.finish(request_id, reason):
            return
        if is_submitted and self._ledger.refuse(aborted_record(request_id)):
            return
        # A scheduler may have admitted it between the two.
        if not self._ledger.finish(request_id, reason) and not self.states([request_id]):
            raise RequestError(f"request {request_id} is not known")

    def _read(
        self,
        request_id: str,
        after: str,
        block_ms: int,
        patience_s: float,
        on_outage: OnOutage | None,
    ) -> list[Event]:
        return wait_out(
            lambda: self._ledger.events(request_id, after, block_ms=block_ms),
            what=f"request {request_id} cannot be read",
            patience_s=patience_s,
            on_outage=on_outage,
        )

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ValueError("a Producer without a tokenizer has tokens alone: use events")
        return self._tokenizer


@contextmanager
def open_producer(
    amqp_url: str,
    redis_url: str,
    *,
    redis_weights_url: str | None = None,
    model: str = "",
) -> Iterator[Producer]:
    """A producer for a cluster; closed at the end. `model` "" is the one that was loaded last.

    Raises `ConfigError` for a malformed URL, `BrokerUnavailable` or `StoreUnavailable` naming host
    and port when a server does not answer, `ModelError` when the model is not loaded.
    """
    from shared.broker.rabbitmq import RabbitmqBroker
    from shared.store.connection import connect
    from shared.store.shards import ShardStore
    from shared.text.document import read_text_document

    with closing(connect(redis_url, None, redis_weights_url)) as stores:
        stores.ping()
        shards = ShardStore(stores.weights)
        manifest = shards.get_manifest(shards.active_layout(model).model_id).checked()
        tokenizer, _ = read_text_document(shards.read_shard(manifest, "tokenizer").tobytes())
        with closing(RabbitmqBroker.connect(amqp_url)) as broker:
            broker.declare(control_queues())
            yield Producer(broker, Ledger(stores.meta), tokenizer=tokenizer)
