"""Submits what clients ask, follows it, lets it be picked up again, and cancels what nobody wants.

Knows no HTTP. Everything that blocks runs on threads of its own.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog

from services.gateway.access import Limits
from services.gateway.answer import Answer
from services.gateway.backend import Backend
from services.gateway.event_ids import EventId, Shown
from services.gateway.note import Note, request_ids
from services.gateway.reader import EventReader
from shared.api.ask import Ask, num_choices, num_logprobs, read_ask
from shared.api.errors import ApiError
from shared.api.schema import ChatCompletion, Generation
from shared.backoff import Backoff
from shared.errors import CellpipeError, RequestError
from shared.messages import FinishReason, Request

log = structlog.get_logger()

T = TypeVar("T")
CANCEL_PATIENCE_S = 60.0
PROBLEM_FRESH_S = 1.0
PROBLEM_PATIENCE_S = 60.0
PROBLEM_GRACE_S = 8.0  # a scheduler that restarts finds what was asked meanwhile in its queue


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """`resume_grace_s`: how long a stream that was cut runs on, so that its client may resume."""

    max_running: int = 256
    max_per_minute: int | None = None
    request_timeout_s: float = 600.0
    resume_grace_s: float = 5.0


class Gateway:
    """`start` and the others belong to one event loop."""

    def __init__(
        self,
        backend: Backend,
        limits: GatewayLimits,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.backend = backend
        self._clock = clock
        self._timing = limits
        self._memory_s = limits.request_timeout_s + backend.keep_answers_s
        self._limits = Limits(max_running=limits.max_running, max_per_minute=limits.max_per_minute)
        self._reader = EventReader(backend.ledger, gather_s=backend.gather_s)
        # Tokenising a long prompt must not keep others from being submitted.
        self._text_threads = ThreadPoolExecutor(2, thread_name_prefix="gateway-text")
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="gateway")
        self._tasks: set[asyncio.Task[None]] = set()
        self._abandoned: dict[str, asyncio.Task[None]] = {}
        self._problem = ""
        self._problem_at_s = -PROBLEM_FRESH_S
        self._problem_since_s: float | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader.start()

    async def stop(self) -> None:
        """What still runs is not cancelled: another gateway may go on with it."""
        for task in (*self._abandoned.values(), *self._tasks):
            task.cancel()
        await asyncio.to_thread(self._reader.stop)
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def ask(self, body: Generation, owner: str) -> Answer:
        """Submit a request. `leave` its answer when done. Raises `ApiError`, `CellpipeError`."""
        number = num_choices(body)
        self._limits.enter(owner, number)
        try:
            ask = await self.text(lambda: read_ask(body, self.backend))
            completion_id = _completion_id(ask.kind)
            note = self._note(body, ask, owner)
            answer = self._follow(completion_id, note)
            try:
                await self._blocking(lambda: self._submit(completion_id, note, ask, body))
            except BaseException:
                answer.close()
                raise
            return answer
        except BaseException:
            self._limits.leave(owner, number)
            raise

    async def pick_up(
        self, completion_id: str, owner: str, event_id: EventId | None = None, *, take: bool
    ) -> Answer:
        """Go on with an answer, from `event_id` on if given. Raises `ApiError` 404.

        Whoever does not `take` it only looks on: another reads it, or comes back for it.
        """
        document = await self._blocking(lambda: self.backend.completions.get(completion_id))
        note = None if document is None else Note.from_dict(document)
        if note is None or note.owner != owner:
            raise ApiError(404, f"no completion {completion_id}", code="completion_not_found")
        if event_id is not None and len(event_id.shown) != note.num_choices:
            raise ApiError(400, "Last-Event-ID has not as many choices", param="Last-Event-ID")
        await self._check_remembered(completion_id, note)
        name = await self._take(completion_id) if take else ""
        self._limits.enter(owner, note.num_choices)
        return self._follow(completion_id, note, event_id.shown if event_id else (), name)

    async def _take(self, completion_id: str) -> str:
        """Become the one who reads an answer: who read it before will not cancel it."""
        abandoned = self._abandoned.pop(completion_id, None)
        if abandoned is not None:
            abandoned.cancel()
            await asyncio.gather(abandoned, return_exceptions=True)
        name, ttl_s = secrets.token_hex(8), self._memory_s
        await self._blocking(
            lambda: self.backend.completions.take(completion_id, name, ttl_s=ttl_s)
        )
        return name

    def leave(self, answer: Answer) -> None:
        """Done with an answer, to its end or not. What runs of it runs on."""
        answer.close()
        self._limits.leave(answer.note.owner, answer.note.num_choices)

    def abandon(self, answer: Answer, *, may_resume: bool) -> None:
        """The client has hung up: `leave`, and cancel unless it wants to come back for it."""
        if answer.note.store or answer.has_ended:
            self.leave(answer)
            return
        if not may_resume or self._timing.resume_grace_s <= 0:
            self.cancel(choice.request_id for choice in answer.choices)
            self.leave(answer)
            return
        answer.close()
        task = asyncio.create_task(self._cancel_later(answer))
        self._abandoned[answer.completion_id] = task

    def cancel(self, requests: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """End requests, as soon as they are admitted; for STOP those whose text is whole."""
        for request_id in requests:
            self._spawn(self._cancel(request_id, reason))

    async def problem(self) -> str:
        """Why requests would not be answered now; "" for no reason."""
        now_s = self._clock()
        if now_s - self._problem_at_s >= PROBLEM_FRESH_S:
            self._problem_at_s = now_s
            try:
                self._problem = await self._blocking(self.backend.problem)
            except CellpipeError as error:
                log.warning("not_ready", reason=str(error))
                self._problem = "a server of the cluster does not answer"
            if not self._problem:
                self._problem_since_s = None
            elif self._problem_since_s is None:
                self._problem_since_s = now_s
        return self._problem

    async def check(self, *, is_running: bool = False) -> None:
        """Raise `ApiError` 503 when requests would not have been answered for a while.

        One that `is_running` has more time: what is missing may come back.
        """
        problem, since_s = await self.problem(), self._problem_since_s
        grace_s = PROBLEM_PATIENCE_S if is_running else PROBLEM_GRACE_S
        if problem and since_s is not None and self._clock() - since_s > grace_s:
            raise ApiError(503, problem, code="not_ready", retry_after_s=5.0)

    async def text(self, work: Callable[[], T]) -> T:
        """Run what may take long over a text."""
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)

    def _note(self, body: Generation, ask: Ask, owner: str) -> Note:
        now_s = time.time()
        return Note(
            kind=ask.kind,
            owner=owner,
            created_unix_s=int(now_s),
            deadline_unix_ms=int((now_s + self._timing.request_timeout_s) * 1000),
            num_prompts=len(ask.prompts),
            n=ask.n,
            stops=body.stop,
            include_usage=body.stream_options is not None and body.stream_options.include_usage,
            store=isinstance(body, ChatCompletion) and bool(body.store),
            logprobs=num_logprobs(body),
            calls=ask.form.calls,
            functions=ask.form.functions,
            parallel=ask.form.parallel,
        )

    def _submit(self, completion_id: str, note: Note, ask: Ask, body: Generation) -> None:
        if body.stream or note.store:
            self.backend.completions.put(completion_id, note.to_dict(), ttl_s=self._memory_s)
        ids = request_ids(completion_id, note.num_choices)
        for number, request_id in enumerate(ids):
            request = Request(
                request_id=request_id,
                token_ids=ask.prompts[number // ask.n],
                model=self.backend.model_id,
                sampling=ask.samplings[number],
                deadline_unix_ms=note.deadline_unix_ms,
                response_format=ask.form.response_format,
            )
            try:
                self.backend.producer.submit(request)
            except CellpipeError:
                self._loop.call_soon_threadsafe(self.cancel, ids[:number])
                raise

    def _follow(
        self, completion_id: str, note: Note, shown: tuple[Shown, ...] = (), reader: str = ""
    ) -> Answer:
        return Answer(
            completion_id,
            note,
            tokenizer=self.backend.tokenizer,
            feed=self._reader.open(request_ids(completion_id, note.num_choices)),
            cut=lambda request_id: self.cancel([request_id], FinishReason.STOP),
            shown=shown,
            reader=reader,
        )

    async def _check_remembered(self, completion_id: str, note: Note) -> None:
        """Raise `ApiError` 404 when the store holds the tokens of an answer no more."""
        if time.time() * 1000 < note.deadline_unix_ms:
            return  # perhaps nobody has admitted it yet
        ids = request_ids(completion_id, note.num_choices)
        states = await self._blocking(lambda: self.backend.ledger.states(ids))
        if len(states) < len(ids):
            raise ApiError(
                404, f"completion {completion_id} has expired", code="completion_not_found"
            )

    async def _cancel_later(self, answer: Answer) -> None:
        try:
            await asyncio.sleep(self._timing.resume_grace_s)
            name = answer.completion_id
            reader = await self._blocking(lambda: self.backend.completions.reader(name))
            if reader == answer.reader:
                self.cancel(choice.request_id for choice in answer.choices)
        except CellpipeError as error:
            log.warning("not_cancelled", completion_id=answer.completion_id, reason=str(error))
        finally:
            if self._abandoned.get(answer.completion_id) is asyncio.current_task():
                del self._abandoned[answer.completion_id]
            self.leave(answer)

    async def _cancel(self, request_id: str, reason: FinishReason) -> None:
        backoff = Backoff(first_s=0.05, max_s=5.0)
        give_up_s = self._clock() + CANCEL_PATIENCE_S
        while True:
            try:
                await self._blocking(
                    lambda: self.backend.producer.cancel(request_id, reason=reason)
                )
                return
            except RequestError:  # nobody has admitted it yet
                if self._clock() > give_up_s:
                    return
            except CellpipeError as error:
                if self._clock() > give_up_s:
                    log.warning("not_cancelled", request_id=request_id, reason=str(error))
                    return
            await asyncio.sleep(backoff.next_s())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _blocking(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _completion_id(kind: str) -> str:
    return f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{secrets.token_hex(12)}"
