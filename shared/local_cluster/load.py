"""Asks the questions of a run, a few at a time, and notes what is seen of each answer and when.

Everything here survives servers that go away: a request whose fate is unknown is sent again under
its id, and a reader that is cut off goes on after its last event. Knows no process and no fault.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.errors import TransientError
from shared.local_cluster.shared_reader import RETRY_S, SharedReader
from shared.messages import FinishReason, Request, SamplingParams
from shared.producer import Producer, new_request_id
from shared.store.ledger_base import START
from shared.store.ledger_types import Event, TokenEvent

MAX_DURATION_S = 45 * 60.0  # the answers of the first minute must still be on record at the end


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and how to answer it: the same tokens, every time."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(slots=True)
class Sighting:
    """What the client of one request saw. Times are seconds of one monotonic clock."""

    request_id: str
    question: int
    submitted_s: float = 0.0
    is_accepted: bool = False
    tokens: list[tuple[float, int, int]] = field(default_factory=list)  # when, position, token id
    finish_reason: FinishReason | None = None
    error: str = ""
    finished_s: float | None = None
    last_event: str = START

    def note(self, event: Event, heard_s: float) -> None:
        self.last_event = event.event_id
        if isinstance(event, TokenEvent):
            self.tokens.append((heard_s, event.position, event.token_id))
        else:
            self.finish_reason = event.finish_reason
            self.error = event.error
            self.finished_s = heard_s


class Load:
    """`num_requests` requests over `questions`, or as many as come in `duration_s`, at most
    `concurrency` at a time. One that was asked is followed to its end, whatever the time."""

    def __init__(
        self,
        producer: Producer,
        questions: Sequence[Question],
        *,
        num_requests: int | None,
        duration_s: float | None = None,
        concurrency: int,
        patience_s: float,
        model_id: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert (num_requests is None) is not (duration_s is None), "a number or a time"
        self.sightings: list[Sighting] = []
        self._num_requests = num_requests
        self._duration_s = duration_s
        self._over_s = float("inf")
        self._next_lock = threading.Lock()
        self._producer = producer
        self._questions = questions
        self._patience_s = patience_s
        self._model_id = model_id
        self._clock = clock
        self._stopping = threading.Event()
        self._failure: BaseException | None = None
        self._reader: SharedReader | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"load-{number}", daemon=True)
            for number in range(min(concurrency, num_requests or concurrency))
        ]

    def start(self) -> None:
        if self._duration_s is not None:
            self._over_s = self._clock() + self._duration_s
        self._reader = SharedReader(
            self._producer,
            patience_s=self._patience_s,
            stopping=self._stopping,
            clock=self._clock,
        )
        for thread in self._threads:
            thread.start()

    def is_running(self) -> bool:
        """Raises what a thread of the load died of, if one did."""
        if self._failure is not None:
            raise self._failure
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Ask and read no more; returns when the threads are done, a few seconds at most."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(10.0)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                sighting = self._next()
                if sighting is None:
                    return
                self._submit(sighting)
                if sighting.is_accepted:
                    self._follow(sighting)
        except BaseException as error:
            self._failure = error
            raise

    def _next(self) -> Sighting | None:
        with self._next_lock:
            number = len(self.sightings)
            if number == self._num_requests or self._clock() >= self._over_s:
                return None
            self.sightings.append(Sighting(new_request_id(), number % len(self._questions)))
            return self.sightings[-1]

    def _submit(self, sighting: Sighting) -> None:
        question = self._questions[sighting.question]
        request = Request(
            request_id=sighting.request_id,
            token_ids=question.prompt,
            model=self._model_id,
            sampling=question.sampling,
        )
        sighting.submitted_s = self._clock()
        while not self._given_up(sighting.submitted_s):
            try:
                self._producer.submit(request)
            except TransientError as error:
                sighting.error = str(error)
                self._stopping.wait(RETRY_S)
            else:
                sighting.is_accepted = True
                sighting.error = ""
                return

    def _follow(self, sighting: Sighting) -> None:
        """Wait for the first token alone, to see when it comes, and for the others with all."""
        assert self._reader is not None, "start was called"
        heard_s = self._clock()
        while sighting.last_event == START:
            if self._given_up(heard_s):
                return
            try:
                for event in self._producer.events(
                    sighting.request_id, silence_s=min(1.0, self._patience_s)
                ):
                    sighting.note(event, self._clock())
                    break
            except TransientError:
                self._stopping.wait(RETRY_S)  # silence, or a store that is away: go on after it
        if sighting.finish_reason is None:
            self._reader.follow(sighting.request_id, sighting.last_event, sighting.note)

    def _given_up(self, heard_s: float) -> bool:
        return self._stopping.is_set() or self._clock() - heard_s > self._patience_s
