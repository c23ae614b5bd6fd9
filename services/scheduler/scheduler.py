"""Admits requests, starts them when there is room, and sees that each is answered.

Owns the request messages: each stays unacked until the request's final event is stored and its
reply is confirmed, so a dead scheduler hands its requests to another by itself. Knows no kernel.
Longer than other modules: it makes the parts that share a turn, each of which is one of its own.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from services.scheduler.admission import (
    Plan,
    ServedModel,
    check_kv_bytes,
    check_workers_bytes,
    kv_bytes,
    kv_bytes_per_position,
    plan_request,
    seed_of,
)
from services.scheduler.answers import Answers
from services.scheduler.capacity import CapacityWatch
from services.scheduler.coverage import CoverageWatch
from services.scheduler.held import Held
from services.scheduler.limits import SchedulerLimits
from services.scheduler.prefixes import Prefixes, PrefixPages
from services.scheduler.records import content_of, plan_of, record_of, refusal_of
from services.scheduler.redrive import Redriver
from services.scheduler.replies import refusal_reply, send_reply
from services.scheduler.token_events import TokenEvents
from services.scheduler.waiting_room import WaitingRoom
from shared import codec
from shared.backoff import Backoff
from shared.broker.base import Broker, Delivery
from shared.errors import (
    CellpipeError,
    ErrorCode,
    PermanentError,
    PublishRefused,
    RequestError,
    TransientError,
)
from shared.kv_budget import KvBudget
from shared.messages import FinishReason, Request
from shared.policy import Surroundings
from shared.silence import Silence
from shared.store.kv_pages import KvPages
from shared.store.ledger_base import RequestLedger
from shared.store.ledger_types import LedgerRecord
from shared.store.presence_types import WorkerInfo
from shared.store.shared_clock import SharedClock
from shared.topology import BATCH_QUEUE, REQUESTS_QUEUE

log = structlog.get_logger()

_FEW_HELD = 8  # a look at all of them at every admission is cheap
MAX_PREFETCH = 65_535  # of AMQP


class Scheduler:
    """Serves the request queues for one model.

    `draw_seed` gives a seed to a request that has none, by its id. `coverage()` gives the number of
    live workers of each group, `peers()` what they tell of themselves. `kv_pages` None is the
    embedded mode, where nothing is left behind in a store. `prefix_pages` None shares no KV pages
    among requests.
    """

    def __init__(
        self,
        *,
        model: ServedModel,
        broker: Broker,
        ledger: RequestLedger,
        kv_pages: KvPages | None,
        prefix_pages: PrefixPages | None = None,
        coverage: Callable[[], Sequence[int]],
        draw_seed: Callable[[str], int] = seed_of,
        peers: Callable[[], Sequence[WorkerInfo]] = tuple,
        limits: SchedulerLimits = SchedulerLimits(),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.num_answered = 0
        self._model = model
        self._broker = broker
        self._ledger = ledger
        self._draw_seed = draw_seed
        self._limits = limits
        self._clock = clock
        self._sleep = sleep
        self._backoff = Backoff(first_s=0.05, max_s=2.0)
        self._held: dict[str, Held] = {}
        self._budget = KvBudget(
            None if kv_pages is None else limits.kv_budget_bytes,
            limits.max_in_flight,
            limits.max_batch_in_flight,
        )
        self._waiting_room = WaitingRoom(
            self._budget, self._send_first, bytes_per_position=kv_bytes_per_position(model.config)
        )
        self._prefixes = Prefixes(prefix_pages, model.layout)
        self._time_of_day = SharedClock(ledger)
        self._coverage = CoverageWatch(coverage, every_s=limits.coverage_check_s)
        silence = Silence()

        def read_peers() -> Sequence[WorkerInfo]:
            infos = peers()
            silence.note(infos, now_s=clock())
            return infos

        self._capacity = CapacityWatch(read_peers, model, every_s=limits.coverage_check_s)
        self._redriver = Redriver(
            layout=model.layout,
            broker=broker,
            ledger=ledger,
            kv_pages=kv_pages,
            prefixes=self._prefixes,
            peers=read_peers,
            silence=silence,
            limits=limits,
            rng=rng or random.Random(),
        )
        self._answers = Answers(
            model=model,
            broker=broker,
            ledger=ledger,
            kv_pages=kv_pages,
            prefixes=self._prefixes,
            limits=limits,
        )
        self._token_events = TokenEvents(broker, ledger, model.tokenizer)
        self._next_poll_s = 0.0
        # Those that only settle must not keep others from running.
        prefetch = limits.max_in_flight * (2 if limits.settle_after_s else 1)
        broker.consume(REQUESTS_QUEUE, prefetch=min(prefetch, MAX_PREFETCH))
        broker.consume(BATCH_QUEUE, prefetch=min((prefetch + 1) // 2, MAX_PREFETCH))

    @property
    def num_in_flight(self) -> int:
        """Requests that it holds and has not answered, whether they run or wait for room."""
        return sum(not held.is_settling for held in self._held.values())

    @property
    def num_waiting(self) -> int:
        return sum(held.is_waiting for held in self._held.values())

    @property
    def num_redrives(self) -> int:
        return self._redriver.num_redrives

    @property
    def reserved_kv_bytes(self) -> int:
        return self._budget.reserved_bytes

    def turn(self, timeout_s: float) -> None:
        """Admit at most one request, then answer, start and drive on those that need it.

        Waits at most `timeout_s`, and no longer than a poll interval while requests run.
        """
        if self._held:
            timeout_s = min(timeout_s, self._limits.poll_s)
        delivery = self._broker.take(timeout_s)
        failures = []
        try:
            if delivery is not None:
                self._admit(delivery)
            if delivery is None or delivery.queue == BATCH_QUEUE:
                # Before this turn's answers make room: whoever waits in the first queue comes with
                # the ack of one, and is to have it.
                self._waiting_room.let_in_batch(self._held)
        except TransientError as error:
            failures.append(str(error))
        try:  # a store too full to admit one more must not keep others from their answers
            self._poll()
        except TransientError as error:
            failures.append(str(error))
        if not failures:
            self._backoff.reset()
            return
        wait_s = self._backoff.next_s()
        log.warning("turn_failed", reason=failures[0], wait_ms=round(wait_s * 1e3))
        self._sleep(wait_s)
        if delivery is not None and not self._holds(delivery):
            self._broker.reject(delivery, requeue=True)

    # admission

    def _admit(self, delivery: Delivery) -> None:
        try:
            request = codec.decode(delivery.body, delivery.content_type)
            if not isinstance(request, Request):
                raise RequestError(f"a {type(request).__name__} has no business in this queue")
        except PermanentError as error:
            self._refuse_unreadable(delivery, error)
            return
        try:
            self._take_in(request, delivery)
        finally:  # what is held will be answered, even if a server failed on the way
            held = self._held.get(request.request_id)
            if request.stream and held is not None and delivery in held.deliveries:
                self._token_events.follow(request.request_id, delivery)

    def _take_in(self, request: Request, delivery: Delivery) -> None:
        held = self._held.get(request.request_id)
        if held is not None:
            if content_of(held.request()) == content_of(request):
                held.add(delivery)
            else:
                self._refuse_other(request.request_id, delivery)
            return
        if self.num_in_flight <= _FEW_HELD:
            # What has ended just now is perhaps what this one begins with: a turn of a chat.
            self._next_poll_s = 0.0
            self._poll()
        try:
            record = self._ledger.get(request.request_id)
            if record is None:
                self._start(request, delivery)
            else:
                self._adopt(record, request, delivery)
        except PermanentError as error:  # what the store holds of it cannot be read
            self._bury(request.request_id, str(error))
            self._hold(request.request_id, delivery)

    def _refuse_unreadable(self, delivery: Delivery, error: PermanentError) -> None:
        request_id = codec.request_id_of(delivery.body, delivery.content_type)
        log.warning("request_refused", request_id=request_id, reason=str(error))
        refusal = self._refusal(request_id, error)
        if request_id:  # whoever waits for its events hears why, unless it is known by a better one
            try:
                self._ledger.refuse(refusal)
            except PermanentError as damage:  # what is left of an earlier one cannot be read
                self._bury(request_id, str(damage))
        self._turn_away(delivery, refusal)

    def _refuse_other(self, request_id: str, delivery: Delivery) -> None:
        """The id is taken: the answer under it is that of another question."""
        error = RequestError(
            f"request id {request_id} belongs to another request; send this one under a new id",
            param="request_id",
        )
        log.warning("request_refused", request_id=request_id, reason=str(error))
        self._turn_away(delivery, self._refusal(request_id, error))

    def _turn_away(self, delivery: Delivery, refusal: LedgerRecord) -> None:
        """Tell the sender of a message, and no other, why it is dead-lettered."""
        try:
            reply = refusal_reply(delivery, refusal)
            send_reply(self._broker, delivery, reply, timeout_s=self._limits.confirm_timeout_s)
        except PublishRefused as refused:
            log.warning("reply_given_up", queue=delivery.reply_to, reason=str(refused))
        self._broker.reject(delivery, requeue=False)

    def _start(self, request: Request, delivery: Delivery) -> None:
        try:
            plan = plan_request(request, self._model, draw_seed=self._draw_seed)
            self._check_fits(plan)
        except RequestError as error:
            self._ledger.refuse(self._refusal(request.request_id, error))
            log.warning("request_refused", request_id=request.request_id, reason=str(error))
            self._hold(request.request_id, delivery)
            return
        record = record_of(
            plan, self._model.layout, created_unix_ms=_unix_ms(), content=content_of(request)
        )
        if not self._ledger.admit(record):
            # Another scheduler has a copy of the request and was faster; its seed counts.
            self._adopt(self._ledger.get(plan.request_id) or record, request, delivery)
            return
        held = self._hold(plan.request_id, delivery, record, is_new=True)
        held.is_waiting = True
        log.info("request_admitted", request_id=plan.request_id, prompt_tokens=len(plan.token_ids))
        self._waiting_room.let_in(self._held)

    def _adopt(self, record: LedgerRecord, request: Request, delivery: Delivery) -> None:
        """Take over a request that another scheduler has admitted.

        One that shows no sign of life may never have been started: it is started anew. Whatever
        else was lost of it will be driven again. One of another model ends: its token ids mean
        something else here.
        """
        # What a scheduler held is its own, though another version may have digested it otherwise.
        is_other = record.content not in ("", content_of(request)) and not delivery.redelivered
        if is_other:
            self._refuse_other(record.request_id, delivery)
            return
        model_id = self._model.layout.model_id
        if record.finish_reason is None and record.model_id != model_id:
            error = f"model {record.model_id} is not served any more; {model_id} is"
            code = ErrorCode.MODEL_NOT_FOUND
            self._ledger.finish(record.request_id, FinishReason.ERROR, error, code)
            record = replace(record, finish_reason=FinishReason.ERROR, error=error)
        held = self._hold(record.request_id, delivery, record)
        if held.running is not None and not held.running.has_moved:
            held.is_waiting = True
            self._end_what_never_fits(record)
        elif held.running is not None:
            self._waiting_room.reserve(record.request_id, held)
        log.info("request_adopted", request_id=record.request_id, generated=record.num_generated)
        self._waiting_room.let_in(self._held)

    def _end_what_never_fits(self, record: LedgerRecord) -> None:
        """One that a larger budget has admitted: here all others would wait behind it."""
        try:
            self._check_fits(plan_of(record))
        except RequestError as error:
            told = _with_remedy(error)
            self._ledger.finish(record.request_id, FinishReason.ERROR, told, error.code)

    def _check_fits(self, plan: Plan) -> None:
        """Raise `RequestError` for what neither the budget nor any worker could ever hold."""
        check_kv_bytes(plan, self._model.config, self._budget.max_bytes)
        self._look_at_capacity(self._clock())
        check_workers_bytes(plan, self._model.config, self._capacity.largest_bytes)

    def _look_at_capacity(self, now_s: float) -> None:
        self._capacity.look(now_s)
        self._budget.worker_bytes = self._capacity.all_bytes

    def _hold(
        self,
        request_id: str,
        delivery: Delivery,
        record: LedgerRecord | None = None,
        *,
        is_new: bool = False,
    ) -> Held:
        held = Held(self._clock(), is_new=is_new, is_batch=delivery.queue == BATCH_QUEUE)
        if record is not None and record.finish_reason is None:
            held.running = self._redriver.watch(record, is_new=is_new, now_s=held.started_s)
            held.kv_bytes = kv_bytes(plan_of(record), self._model.config)
            self._waiting_room.enter(request_id, is_batch=held.is_batch)
        self._held[request_id] = held
        held.add(delivery)
        return held

    def _send_first(self, request_id: str, held: Held) -> None:
        try:
            self._redriver.start(request_id, held, now_s=self._clock())
        except PermanentError as error:
            self._bury(request_id, str(error))

    def _holds(self, delivery: Delivery) -> bool:
        return any(delivery in held.deliveries for held in self._held.values())

    # the life and end of requests

    def _poll(self) -> None:
        now_s = self._clock()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + self._limits.poll_s
        self._answers.sweep(now_s=now_s)
        if not self._held:
            return
        self._coverage.look(now_s)
        self._look_at_capacity(now_s)
        self._prefixes.relieve(now_s)
        states = self._ledger.states(list(self._held))
        for request_id, held in list(self._held.items()):
            state = states.get(request_id)
            is_over = state is not None and state.finish_reason is not None
            if held.settle_at_s is not None and not is_over:
                self._take_again(request_id, held)
            elif state is None:
                self._bury(request_id, "the store has lost the record of this request")
            elif is_over:
                held.running = None
                self._budget.release(request_id)  # a reply that nobody takes keeps no room
                if held.retry_at_s <= now_s:
                    self._token_events.end(request_id, state.committed_position)
                    self._answer(request_id, held, now_s)
            else:
                self._token_events.tell(request_id, state.committed_position)
                self._prefixes.committed(request_id, state.committed_position)
        damaged = self._redriver.look(self._held, states, self._surroundings(now_s))
        for request_id, reason in damaged.items():
            self._bury(request_id, reason)
        for request_id, held in self._held.items():
            if held.running is not None and not held.is_waiting:
                self._waiting_room.reserve(request_id, held)  # what was shared may be lost
        self._waiting_room.let_in(self._held)

    def _surroundings(self, now_s: float) -> Surroundings:
        return Surroundings(
            now_s=now_s,
            now_unix_ms=self._time_of_day.unix_ms(),
            num_groups=self._model.layout.num_groups,
            uncovered_group=self._coverage.uncovered_group,
            uncovered_since_s=self._coverage.uncovered_since_s,
        )

    def _answer(self, request_id: str, held: Held, now_s: float) -> None:
        try:
            is_done = self._answers.answer(request_id, held, now_s=now_s)
        except PermanentError as error:  # what the store holds of it cannot be read
            self._bury(request_id, str(error))
            return
        if is_done:
            del self._held[request_id]
            self.num_answered += 1

    def _take_again(self, request_id: str, held: Held) -> None:
        """The store has lost the end that it told of: its messages come again, and it goes on."""
        log.warning("request_end_lost", request_id=request_id)
        del self._held[request_id]
        self._budget.release(request_id)
        for delivery in held.deliveries:
            self._broker.reject(delivery, requeue=True)

    def leave(self) -> None:
        """Ack what only settles: nobody is to answer it again."""
        for held in self._held.values():
            self._answers.settle(held)

    def _bury(self, request_id: str, reason: str) -> None:
        """End a request whose record the store has lost or garbled; the next poll answers it.

        Its message would start it again, but not from where its readers are.
        """
        error = f"{reason}; send it again under a new id"
        self._ledger.bury(
            refusal_of(
                request_id,
                self._model.layout,
                error,
                code=ErrorCode.LOST,
                created_unix_ms=_unix_ms(),
            )
        )
        self._answers.delete_rows(request_id, self._model.config.max_position_embeddings)
        self._prefixes.forget(request_id)
        log.error("request_buried", request_id=request_id, reason=reason)

    def _refusal(self, request_id: str, error: PermanentError) -> LedgerRecord:
        """The end of a request that is not admitted."""
        by_name = error if isinstance(error, RequestError) else RequestError(str(error))
        return refusal_of(
            request_id,
            self._model.layout,
            _with_remedy(error),
            code=by_name.code,
            param=by_name.param,
            created_unix_ms=_unix_ms(),
        )


def _with_remedy(error: CellpipeError) -> str:
    return f"{error}; {error.remedy}" if error.remedy else str(error)


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
