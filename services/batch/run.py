"""Runs a batch: submits a bounded number of requests, looks how far they are, writes their lines.

Everything may be killed at any time. A request that a killed run has submitted is known to the
ledger by its id: the next run follows it, or reads its answer, and computes nothing again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import structlog

from services.batch.bodies import error_body, response_body, response_logprobs, was_refused
from services.batch.lines import Entry, Line
from services.batch.output import BatchOutput
from shared.backoff import Backoff
from shared.errors import Overloaded, PermanentError, RequestError, TransientError
from shared.messages import FinishReason, Reply, Request
from shared.producer import Producer
from shared.store.ledger_types import RequestState
from shared.text.tokenizer import Tokenizer

log = structlog.get_logger()

POLL_S = 0.05
CHECK_EVERY_S = 1.0
PATIENCE_S = 60.0  # without servers or schedulers: longer than either takes to be restarted


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`patience_s` is how long servers and schedulers may be away before the run gives up."""

    concurrency: int = 32
    patience_s: float = PATIENCE_S


@dataclass(slots=True)
class Progress:
    """How far a run is. `num_tokens` were generated while it looked."""

    num_requests: int
    num_done: int
    num_failed: int
    num_tokens: int = 0


@dataclass(slots=True)
class _Pending:
    """A request whose line is not written. `seen`: the ledger has known it. `num_tokens` are what
    it generated since `first_position`, where it stood when this run first looked."""

    line: Line
    was_known: bool
    seen: bool
    first_position: int | None = None
    num_tokens: int = 0

    def look(self, state: RequestState) -> None:
        self.seen = True
        if self.first_position is None:
            self.first_position = state.committed_position
        self.num_tokens = state.committed_position - self.first_position


@dataclass
class BatchRun:
    """`turn` until `is_done`. `read` gives the line of an entry, `check` raises a `TransientError`
    when nobody is there to serve, and anything else when all is lost."""

    producer: Producer
    output: BatchOutput
    entries: Iterable[Entry]
    read: Callable[[Entry], Line]
    check: Callable[[], None]
    model_id: str
    tokenizer: Tokenizer
    limits: BatchLimits = BatchLimits()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _todo: deque[Entry] = field(init=False)
    _pending: dict[str, _Pending] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        entries = list(self.entries)
        self._num_requests = len(entries)
        self._todo = deque(e for e in entries if e.key not in self.output.done)
        self._ended_tokens = 0
        self._submit_at_s = 0.0
        self._overload = Backoff(first_s=1.0, max_s=60.0)
        self._outage = Backoff(first_s=0.1, max_s=5.0)
        self._worked_at_s = self._checked_at_s = self.clock()

    @property
    def is_done(self) -> bool:
        return not self._todo and not self._pending

    def progress(self) -> Progress:
        running = sum(pending.num_tokens for pending in self._pending.values())
        return Progress(
            self._num_requests,
            len(self.output.done),
            self.output.num_failed,
            self._ended_tokens + running,
        )

    def turn(self) -> None:
        """Submit what there is room for, write the lines of what has ended; then wait a little.

        Raises the `TransientError` of servers or schedulers that are away for too long: a later
        run goes on from here.
        """
        try:
            has_submitted = self._submit()
            num_ended = self._look()
            if not (has_submitted or num_ended):
                self._check_when_due()
        except TransientError as error:
            if self.clock() - self._worked_at_s > self.limits.patience_s:
                raise
            wait_s = self._outage.next_s()
            log.warning("batch_waits", reason=str(error), wait_ms=round(wait_s * 1e3))
            self.sleep(wait_s)
            return
        self._worked_at_s = self.clock()
        self._outage.reset()
        if not self.is_done and not num_ended:
            self.sleep(POLL_S)

    def _submit(self) -> bool:
        """Whether anything was taken from the file."""
        room = self.limits.concurrency - len(self._pending)
        if not self._todo or room <= 0 or self.clock() < self._submit_at_s:
            return False
        next_up = [self._todo[index] for index in range(min(room, len(self._todo)))]
        known = self.producer.states(entry.request_id for entry in next_up)
        for entry in next_up:
            line = self.read(entry)
            is_known = entry.request_id in known
            try:
                if line.request is None:
                    raise RequestError(line.error)
                if not is_known and not self._hand_over(line.request):
                    break
            except RequestError as error:  # what it asks for, or its size
                self.output.write(_refusal_line(line, str(error)))
            else:
                self._pending[entry.request_id] = _Pending(line, is_known, is_known)
            self._todo.popleft()
        return True

    def _hand_over(self, request: Request) -> bool:
        """False when the cluster takes no more for now. Raises `RequestError` for its size."""
        try:
            self.producer.submit(request, batch=True)
        except Overloaded as error:
            self._submit_at_s = self.clock() + max(error.retry_after_s, self._overload.next_s())
            return False
        self._overload.reset()
        return True

    def _look(self) -> int:
        """How many have ended since the last look."""
        if not self._pending:
            return 0
        states = self.producer.states(self._pending)
        ended = []
        for request_id, pending in self._pending.items():
            state = states.get(request_id)
            if state is not None:
                pending.look(state)
                if state.finish_reason is not None:
                    ended.append(request_id)
            elif pending.seen and pending.line.request is not None:
                # The store has lost it, or forgotten its end: it is asked for anew.
                pending.seen = not self._hand_over(pending.line.request)
        for request_id in ended:
            self._write(request_id, self._pending[request_id])
        return len(ended)

    def _write(self, request_id: str, pending: _Pending) -> None:
        line = pending.line
        try:
            reply = self.producer.result(request_id, timeout_s=0)
            answer = _answer_line(line, reply, self.model_id, self.tokenizer)
        except PermanentError as error:
            self.output.write(_line(line, error=("store_damaged", str(error))))
        else:
            self.output.write(answer)
            num_tokens = pending.num_tokens if pending.was_known else len(reply.token_ids)
            self._ended_tokens += num_tokens
        del self._pending[request_id]

    def _check_when_due(self) -> None:
        if self.clock() - self._checked_at_s >= CHECK_EVERY_S:
            self.check()
            self._checked_at_s = self.clock()


def _answer_line(line: Line, reply: Reply, model_id: str, tokenizer: Tokenizer) -> dict[str, Any]:
    if was_refused(reply):
        return _refusal_line(line, reply.error)
    if reply.finish_reason is FinishReason.ERROR:
        return _line(line, error=("request_failed", reply.error))
    if reply.finish_reason is FinishReason.ABORT:
        return _line(line, error=("cancelled", "the request was cancelled"))
    num_top = line.request.sampling.logprobs if line.request else None
    body = response_body(
        line.url,
        reply,
        model_id=model_id,
        created_unix_s=int(time.time()),
        logprobs=None
        if num_top is None
        else response_logprobs(line.url, reply, num_top, tokenizer),
    )
    return _line(line, status_code=200, body=body)


def _refusal_line(line: Line, message: str) -> dict[str, Any]:
    if line.entry.custom_id is None:
        return _line(line, error=("invalid_line", message))
    return _line(line, status_code=400, body=error_body(message, param=line.param))


def _line(
    line: Line,
    *,
    status_code: int = 0,
    body: dict[str, Any] | None = None,
    error: tuple[str, str] | None = None,
) -> dict[str, Any]:
    request_id = line.entry.request_id
    response = {"status_code": status_code, "request_id": request_id, "body": body}
    return {
        "id": request_id,
        "custom_id": line.entry.custom_id,
        "response": None if error else response,
        "error": {"code": error[0], "message": error[1]} if error else None,
    }
