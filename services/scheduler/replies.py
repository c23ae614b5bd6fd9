"""Replies, and the queues that requests name for them."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from shared import codec
from shared.broker.base import Broker, Delivery, Outgoing
from shared.errors import StoreDamaged, Unroutable
from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason, Reply, Token
from shared.store.ledger_base import RequestLedger, token_events
from shared.store.ledger_types import LedgerRecord
from shared.text.tokenizer import Tokenizer

log = structlog.get_logger()

MAX_LOGPROBS = 120_000  # of one reply: as JSON some 5 MiB of the 8 that a message may have


def send_reply(broker: Broker, delivery: Delivery, reply: Reply, *, timeout_s: float) -> None:
    """Answer a request message in its own content type; returns once the broker has the reply.

    A request without `reply_to`, or one whose queue is gone, is no error: whoever asked has left.
    Raises `PublishRefused` when the queue is full, else what `Confirm.wait` does.
    """
    if not delivery.reply_to:
        return
    try:
        broker.publish([answer_to(delivery, reply, persistent=True)]).wait(timeout_s)
    except Unroutable:
        log.warning("reply_queue_gone", queue=delivery.reply_to, request_id=reply.request_id)


def answer_to(delivery: Delivery, message: Reply | Token, *, persistent: bool) -> Outgoing:
    """A message for the reply queue of a request message, in the request's own content type."""
    as_json = delivery.content_type.partition(";")[0].strip().lower() == codec.JSON
    return Outgoing(
        delivery.reply_to,
        codec.encode_json(message) if as_json else codec.encode(message),
        persistent=persistent,
        content_type=codec.JSON if as_json else codec.MSGPACK,
        correlation_id=delivery.correlation_id,
    )


def refusal_reply(delivery: Delivery, refusal: LedgerRecord) -> Reply:
    """The reply to a message that could not be read, which may name its request or not."""
    return Reply(
        # Any bytes may stand there, and come as lone surrogates, which no frame can hold.
        request_id=refusal.request_id
        or delivery.correlation_id[:64].encode(errors="replace").decode(),
        finish_reason=FinishReason.ERROR,
        text="",
        token_ids=(),
        num_prompt_tokens=0,
        error=refusal.error,
        error_code=refusal.error_code,
        error_param=refusal.error_param,
    )


def reply_of(
    record: LedgerRecord,
    token_ids: Sequence[int],
    tokenizer: Tokenizer,
    logprobs: tuple[TokenLogprobs, ...] | None = None,
) -> Reply:
    """The answer to a request that has ended. Raises `StoreDamaged` unless all tokens are there."""
    if len(token_ids) != record.num_generated:
        raise StoreDamaged(
            f"the store holds {len(token_ids)} of the {record.num_generated} tokens of "
            f"request {record.request_id}"
        )
    return Reply(
        request_id=record.request_id,
        finish_reason=record.finish_reason or FinishReason.ERROR,
        text=tokenizer.decode(token_ids, skip_special=True),
        token_ids=tuple(token_ids),
        num_prompt_tokens=record.num_prompt_tokens,
        error=record.error,
        num_cached_tokens=record.num_cached,
        error_code=record.error_code,
        error_param=record.error_param,
        logprobs=logprobs,
    )


def read_logprobs(ledger: RequestLedger, record: LedgerRecord) -> tuple[TokenLogprobs, ...] | None:
    """Those of each token; None where nobody asked, or they are too many for a message."""
    num_top = record.sampling.logprobs
    if num_top is None or record.num_generated * (1 + num_top) > MAX_LOGPROBS:
        return None
    found = [event.logprobs for event in token_events(ledger, record.request_id)]
    known = tuple(each for each in found if each is not None)
    return known if len(known) == record.num_generated else None


def _readable(text: str) -> str:
    """Any bytes may come as lone surrogates, which no frame can hold."""
    return text.encode(errors="replace").decode()
