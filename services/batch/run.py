"""Runs a batch: submits a bounded number of requests, looks how far they are, writes their lines.

Everything may be killed at any time. A request that a killed run has submitted is known to the
ledger by its id: the next run follows it, or reads its answer, and computes nothing again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from services.batch.line_answer import LineAnswer, Part, error_line
from services.batch.lines import Entry, Line
from services.batch.output import BatchOutput
from shared.api.errors import ApiError, api_error
from shared.api.model import ApiModel
from shared.backoff import Backoff
from shared.errors import Overloaded, PermanentError, RequestError, TransientError
from shared.messages import FinishReason, Request
from shared.producer import Producer

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


@dataclass
class BatchRun:
    """`turn` until `is_done`. `read` gives the line of an entry, `check` raises a `TransientError`
    when nobody is there to serve, and anything else when all is lost."""

    producer: Producer
    output: BatchOutput
    entries: Iterable[Entry]
    read: Callable[[Entry], Line]
    check: Callable[[], None]
    model: ApiModel
    limits: BatchLimits = BatchLimits()
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _todo: deque[Entry] = field(init=False)
    _pending: list[LineAnswer] = field(init=False, default_factory=list)
    _large: Line | None = field(init=False, default=None)  # waits for room

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
        running = sum(answer.num_tokens for answer in self._pending)
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
        room = self.limits.concurrency - sum(len(answer.parts) for answer in self._pending)
        if not self._todo or room <= 0 or self.clock() < self._submit_at_s:
            return False
        lines: list[Line] = []
        for entry in self._todo:
            line = self._read(entry)
            room -= len(line.requests)
            # One of many requests waits until it fits, or is alone.
            if room < 0 and (lines or self._pending):
                self._large = line
                break
            lines.append(line)
            if room <= 0 or len(lines) == self.limits.concurrency:
                break
        ids = [request.request_id for line in lines for request in line.requests]
        known = frozenset(self.producer.states(ids))
        for line in lines:
            try:
                if line.error is not None:
                    raise line.error
                requests = [r for r in line.requests if r.request_id not in known]
                if not all(map(self._hand_over, requests)):
                    break
            except RequestError as error:  # its size
                self.output.write(error_line(line, api_error(error)))
            except ApiError as error:  # what it asks for
                self.output.write(error_line(line, error))
            else:
                self._pending.append(LineAnswer(line, self.model, known))
            self._todo.popleft()
        return bool(lines)

    def _read(self, entry: Entry) -> Line:
        """What a line asks for; of one that waits for room, not at every turn again."""
        if self._large is not None and self._large.entry is entry:
            return self._large
        return self.read(entry)

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
        parts = {p.request.request_id: p for answer in self._pending for p in answer.parts}
        states = self.producer.states(parts)
        for request_id, part in parts.items():
            state = states.get(request_id)
            if state is not None:
                part.look(state)
            elif part.seen:
                # The store has lost it, or forgotten its end: it is asked for anew.
                part.forget()
                part.seen = not self._hand_over(part.request)
        self._cut([part for part in parts.values() if part.seen and part.may_be_cut])
        ended = [answer for answer in self._pending if answer.has_ended]
        for answer in ended:
            self._write(answer)
        return len(ended)

    def _cut(self, parts: list[Part]) -> None:
        """End requests whose text a stop string has ended."""
        running = {p.request.request_id: p for p in parts if not p.has_ended}
        after = {i: part.after for i, part in running.items() if not part.choice.was_cut}
        for request_id, events in self.producer.new_events(after).items():
            running[request_id].take(events)
        for request_id, part in running.items():
            if part.choice.was_cut and part.choice.final is None:
                self.producer.cancel(request_id, is_submitted=True, reason=FinishReason.STOP)

    def _write(self, answer: LineAnswer) -> None:
        try:
            for part in answer.parts:
                self._read_rest(part)
        except PermanentError as error:
            failure = ApiError(500, str(error), code="store_damaged")
            self.output.write(error_line(answer.line, failure))
        else:
            self.output.write(answer.output_line())
        self._ended_tokens += answer.num_new_tokens
        self._pending.remove(answer)

    def _read_rest(self, part: Part) -> None:
        """The events of a request that has ended, to the last."""
        request_id = part.request.request_id
        while part.choice.final is None:
            events = self.producer.new_events({request_id: part.after}).get(request_id, [])
            part.take(events)
            if not events:
                return

    def _check_when_due(self) -> None:
        if self.clock() - self._checked_at_s >= CHECK_EVERY_S:
            self.check()
            self._checked_at_s = self.clock()
