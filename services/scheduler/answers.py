"""Answers requests that have ended, and forgets what the store holds for them alone.

Owns the order: full KV pages are shared, the others go, the reply is confirmed, the end is on the
store's disk, the message is acked. Knows no step.
"""

from __future__ import annotations

from collections import deque

import structlog

from services.scheduler.admission import ServedModel
from services.scheduler.held import Held
from services.scheduler.limits import SchedulerLimits
from services.scheduler.prefixes import Prefixes
from services.scheduler.replies import read_logprobs, reply_of, send_reply
from shared.broker.base import Broker
from shared.errors import PublishRefused
from shared.messages import MAX_DRAFT_LEN
from shared.store.kv_pages import KvPages
from shared.store.ledger_base import RequestLedger

log = structlog.get_logger()


class Answers:
    """`kv_pages` None is the embedded mode, where nothing is left behind in a store."""

    def __init__(
        self,
        *,
        model: ServedModel,
        broker: Broker,
        ledger: RequestLedger,
        kv_pages: KvPages | None,
        prefixes: Prefixes,
        limits: SchedulerLimits,
    ) -> None:
        self._model = model
        self._broker = broker
        self._ledger = ledger
        self._kv_pages = kv_pages
        self._prefixes = prefixes
        self._limits = limits
        self._sweeps: deque[tuple[float, str, int]] = deque()  # due, request, positions

    def answer(self, request_id: str, held: Held, *, now_s: float) -> bool:
        """Reply to every message of an ended request; ack them later. True once all are acked.

        A reply queue that is full is tried again after `held.retry_at_s`. Raises `StoreDamaged`
        or `DecodeError` for what cannot be read.
        """
        if held.settle_at_s is None:
            held.settle_at_s = now_s + self._limits.settle_after_s
        if held.unanswered and not self._reply(request_id, held, now_s=now_s):
            return False
        if now_s < held.settle_at_s:
            held.retry_at_s = held.settle_at_s
            return False
        self.settle(held)
        return True

    def settle(self, held: Held) -> None:
        """Ack what is answered: its end is stored and its reply confirmed."""
        for delivery in (*held.answered, *held.returned):
            self._broker.ack(delivery)
        held.answered, held.returned = [], []

    def _reply(self, request_id: str, held: Held, *, now_s: float) -> bool:
        """Whether every message has its reply."""
        record = self._ledger.get(request_id)
        if record is None:
            return False  # lost just now: the next poll sees it
        is_awaited = any(delivery.reply_to for delivery in held.unanswered)
        reply = reply_of(
            record,
            self._ledger.tokens(request_id),
            self._model.tokenizer,
            read_logprobs(self._ledger, record) if is_awaited else None,
        )
        self._prefixes.ended(record, reply.token_ids)
        # And those of the longest step that was sent ahead of a commit that the end refused.
        num_positions = record.num_prompt_tokens + record.num_generated + 1 + MAX_DRAFT_LEN
        self.delete_rows(request_id, num_positions)
        for delivery in list(held.unanswered):
            try:
                send_reply(self._broker, delivery, reply, timeout_s=self._limits.confirm_timeout_s)
            except PublishRefused as refused:
                if held.refused_since_s is None:
                    held.refused_since_s = now_s
                if now_s - held.refused_since_s < self._limits.reply_patience_s:
                    continue
                # Its reader is gone or stuck; the answer stays in the event stream.
                log.warning("reply_given_up", queue=delivery.reply_to, reason=str(refused))
            held.unanswered.remove(delivery)
            held.answered.append(delivery)
        if held.unanswered:
            held.retry_at_s = now_s + self._limits.reply_retry_s
            return False
        if record.epoch > 0:
            # What was fenced off may still write rows, until it comes to the commit.
            due_s = now_s + self._limits.sweep_after_s
            self._sweeps.append((due_s, request_id, record.max_position + 1))
        log.info(
            "request_done",
            request_id=request_id,
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.num_prompt_tokens,
            cached_tokens=reply.num_cached_tokens,
            tokens=len(reply.token_ids),
            duration_ms=round((now_s - held.started_s) * 1e3),
            error=reply.error,
        )
        return True

    def delete_rows(self, request_id: str, num_positions: int) -> None:
        if self._kv_pages is not None:
            self._kv_pages.delete(request_id, self._model.layout.num_groups, num_positions)

    def sweep(self, *, now_s: float) -> None:
        """Delete once more what late steps of ended requests may have written."""
        while self._sweeps and self._sweeps[0][0] <= now_s:
            _, request_id, num_positions = self._sweeps[0]
            self.delete_rows(request_id, num_positions)
            self._sweeps.popleft()
