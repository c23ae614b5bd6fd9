"""Admits requests, starts them, and answers them when they end.

Owns the request messages: each stays unacked until the request's final event is stored and its
reply is confirmed, so a dead scheduler hands its requests to another by itself. Knows no kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from services.scheduler.admission import Plan, ServedModel, first_step, plan_request
from services.scheduler.held import Held
from services.scheduler.limits import SchedulerLimits
from services.scheduler.records import plan_of, record_of, refusal_of
from services.scheduler.replies import refusal_reply, reply_of, send_reply
from shared import codec
from shared.backoff import Backoff
from shared.broker.base import Broker, Delivery, Outgoing
from shared.errors import (
    CellpipeError,
    PermanentError,
    PublishRefused,
    RequestError,
    TransientError,
)
from shared.messages import FinishReason, Reply, Request
from shared.store.kv_pages import KvPages
from shared.store.ledger import Ledger
from shared.store.ledger_types import LedgerRecord
from shared.topology import REQUESTS_QUEUE, group_queue

log = structlog.get_logger()


class Scheduler:
    """Serves the requests queue for one model.

    `coverage()` gives the number of live workers of each group. `kv_pages` None is the embedded
    mode, where nothing is left behind in a store.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        broker: Broker,
        ledger: Ledger,
        kv_pages: KvPages | None,
        coverage: Callable[[], Sequence[int]],
        draw_seed: Callable[[], int],
        limits: SchedulerLimits = SchedulerLimits(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_answered = 0
        self._model = model
        self._broker = broker
        self._ledger = ledger
        self._kv_pages = kv_pages
        self._coverage = coverage
        self._draw_seed = draw_seed
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(first_s=0.05, max_s=2.0)
        self._held: dict[str, Held] = {}
        self._next_poll_s = 0.0
        self._next_coverage_s = 0.0
        self._uncovered_since_s: float | None = None
        broker.consume(REQUESTS_QUEUE, prefetch=limits.max_in_flight)

    @property
    def num_in_flight(self) -> int:
        return len(self._held)

    def turn(self, timeout_s: float) -> None:
        """Admit at most one request, then answer those that have ended.

        Waits at most `timeout_s`, and no longer than a poll interval while requests run.
        """
        if self._held:
            timeout_s = min(timeout_s, self._limits.poll_s)
        delivery = self._broker.take(timeout_s)
        try:
            if delivery is not None:
                self._admit(delivery)
            self._poll()
        except TransientError as error:
            wait_s = self._backoff.next_s()
            log.warning("turn_failed", reason=str(error), wait_ms=round(wait_s * 1e3))
            self._sleep(wait_s)
            if delivery is not None and not self._holds(delivery):
                self._broker.reject(delivery, requeue=True)
        else:
            self._backoff.reset()

    # admission

    def _admit(self, delivery: Delivery) -> None:
        try:
            request = codec.decode(delivery.body, delivery.content_type)
            if not isinstance(request, Request):
                raise RequestError(f"a {type(request).__name__} has no business in this queue")
            held = self._held.get(request.request_id)
            if held is not None:
                held.add(delivery)
                return
        except PermanentError as error:
            self._refuse_unreadable(delivery, str(error))
            return
        try:
            record = self._ledger.get(request.request_id)
            if record is None:
                self._start(request, delivery)
            else:
                self._adopt(record, delivery)
        except PermanentError as error:  # what the store holds of it cannot be read
            self._bury(request, str(error))
            self._hold(request.request_id, delivery, request.deadline_unix_ms)

    def _refuse_unreadable(self, delivery: Delivery, error: str) -> None:
        request_id = codec.request_id_of(delivery.body, delivery.content_type)
        log.warning("request_refused", request_id=request_id, reason=error)
        if request_id:  # whoever waits for its events hears why, unless it is known by a better one
            self._ledger.refuse(self._refusal(request_id, error))
        try:
            self._send_reply(delivery, refusal_reply(delivery, request_id, error))
        except PublishRefused as refused:
            log.warning("reply_given_up", queue=delivery.reply_to, reason=str(refused))
        self._broker.reject(delivery, requeue=False)

    def _start(self, request: Request, delivery: Delivery) -> None:
        try:
            plan = plan_request(request, self._model, draw_seed=self._draw_seed)
        except RequestError as error:
            self._ledger.refuse(self._refusal(request.request_id, _with_remedy(error)))
            log.warning("request_refused", request_id=request.request_id, reason=str(error))
            self._hold(request.request_id, delivery, request.deadline_unix_ms)
            return
        record = record_of(plan, self._model.layout, created_unix_ms=_unix_ms())
        if not self._ledger.admit(record):
            # Another scheduler has a copy of the request and was faster; its seed counts.
            self._adopt(self._ledger.get(plan.request_id) or record, delivery)
            return
        self._publish_start(plan)
        self._hold(plan.request_id, delivery, plan.deadline_unix_ms)
        log.info("request_started", request_id=plan.request_id, prompt_tokens=len(plan.token_ids))

    def _adopt(self, record: LedgerRecord, delivery: Delivery) -> None:
        """Take over a request that another scheduler has admitted."""
        model_id = self._model.layout.model_id
        if record.finish_reason is None and record.model_id != model_id:
            # Its token ids mean something else here.
            error = f"model {record.model_id} is not served any more; {model_id} is"
            self._ledger.finish(record.request_id, FinishReason.ERROR, error)
        elif record.finish_reason is None and record.num_generated == 0:
            # Its start may never have been published. A second start is harmless: the first
            # commit of a position wins.
            self._publish_start(plan_of(record))
        self._hold(record.request_id, delivery, record.deadline_unix_ms)
        log.info("request_adopted", request_id=record.request_id, generated=record.num_generated)

    def _publish_start(self, plan: Plan) -> None:
        layout = self._model.layout
        queue = group_queue(layout.model_id, layout.layout_id, 0)
        body = codec.encode(first_step(plan, layout, epoch=0))
        self._broker.publish([Outgoing(queue, body)]).wait(self._limits.confirm_timeout_s)

    def _hold(self, request_id: str, delivery: Delivery, deadline_unix_ms: int) -> None:
        held = self._held[request_id] = Held(self._clock(), deadline_unix_ms)
        held.add(delivery)

    def _holds(self, delivery: Delivery) -> bool:
        return any(delivery in held.deliveries for held in self._held.values())

    # the end of requests

    def _poll(self) -> None:
        now_s = self._clock()
        if not self._held or now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + self._limits.poll_s
        self._end_overdue()
        self._end_uncovered(now_s)
        states = self._ledger.states(list(self._held))
        for request_id, held in list(self._held.items()):
            state = states.get(request_id)
            if state is None:
                self._bury(held.request(), "the store has lost the record of this request")
            elif state.finish_reason is not None and held.retry_at_s <= now_s:
                try:
                    self._answer(request_id, held, now_s)
                except PermanentError as error:  # what the store holds of it cannot be read
                    self._bury(held.request(), str(error))

    def _bury(self, request: Request, reason: str) -> None:
        """End a request whose record the store has lost or garbled; the next poll answers it.

        Its message would start it again, but not from where its readers are.
        """
        error = f"{reason}; send it again under a new id"
        self._ledger.bury(self._refusal(request.request_id, error))
        if self._kv_pages is not None:
            num_positions = self._model.config.max_position_embeddings
            self._kv_pages.delete(request.request_id, self._model.layout.num_groups, num_positions)
        log.error("request_buried", request_id=request.request_id, reason=reason)

    def _end_overdue(self) -> None:
        now_unix_ms = _unix_ms()
        for request_id, held in self._held.items():
            if 0 < held.deadline_unix_ms <= now_unix_ms:
                self._ledger.finish(
                    request_id, FinishReason.ERROR, "the request's deadline has passed"
                )

    def _end_uncovered(self, now_s: float) -> None:
        """End what runs when a layer group has had no live worker for too long."""
        if now_s < self._next_coverage_s:
            return
        self._next_coverage_s = now_s + self._limits.coverage_check_s
        coverage = self._coverage()
        missing = [group for group, num_workers in enumerate(coverage) if num_workers == 0]
        if not missing:
            self._uncovered_since_s = None
            return
        if self._uncovered_since_s is None:
            self._uncovered_since_s = now_s
        reason = (
            f"layer group {missing[0]} of {len(coverage)} has no live worker; "
            f"start one: cellpipe worker --group {missing[0]}"
        )
        for request_id, held in self._held.items():
            since_s = max(self._uncovered_since_s, held.started_s)
            if now_s - since_s >= self._limits.uncovered_grace_s:
                self._ledger.finish(request_id, FinishReason.ERROR, reason)

    def _answer(self, request_id: str, held: Held, now_s: float) -> None:
        """Reply to every message of an ended request and ack it, unless its reply queue is full."""
        record = self._ledger.get(request_id)
        if record is None:
            return  # lost just now: the next poll sees it
        if self._kv_pages is not None:
            num_positions = record.num_prompt_tokens + record.num_generated
            self._kv_pages.delete(request_id, self._model.layout.num_groups, num_positions)
        reply = reply_of(record, self._ledger.tokens(request_id), self._model.tokenizer)
        for delivery in list(held.unanswered):
            try:
                self._send_reply(delivery, reply)
            except PublishRefused as refused:
                if held.refused_since_s is None:
                    held.refused_since_s = now_s
                if now_s - held.refused_since_s < self._limits.reply_patience_s:
                    continue
                # Its reader is gone or stuck; the answer stays in the event stream.
                log.warning("reply_given_up", queue=delivery.reply_to, reason=str(refused))
            self._broker.ack(delivery)  # the final event is stored and the reply confirmed
            held.unanswered.remove(delivery)
        if held.unanswered:
            held.retry_at_s = now_s + self._limits.reply_retry_s
            return
        for delivery in held.returned:
            self._broker.ack(delivery)
        del self._held[request_id]
        self.num_answered += 1
        log.info(
            "request_done",
            request_id=request_id,
            finish_reason=reply.finish_reason,
            prompt_tokens=reply.num_prompt_tokens,
            tokens=len(reply.token_ids),
            duration_ms=round((self._clock() - held.started_s) * 1e3),
            error=reply.error,
        )

    def _refusal(self, request_id: str, error: str) -> LedgerRecord:
        layout = self._model.layout
        return refusal_of(request_id, layout, error, created_unix_ms=_unix_ms())

    def _send_reply(self, delivery: Delivery, reply: Reply) -> None:
        send_reply(self._broker, delivery, reply, timeout_s=self._limits.confirm_timeout_s)


def _with_remedy(error: CellpipeError) -> str:
    return f"{error}; {error.remedy}" if error.remedy else str(error)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
