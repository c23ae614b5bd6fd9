"""Reads the answers of many requests with one wait for all of them, as a gateway does.

A reader of its own for each takes processors from what is measured: 8 % of a core for 16 of them at
430 tokens a second.
Knows no process and no fault.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from shared.errors import TransientError
from shared.producer import Producer
from shared.store.ledger_types import Event, FinalEvent

RETRY_S = 0.2
WAIT_MS = 10  # for events, before requests that came meanwhile are looked at


@dataclass(slots=True)
class _Followed:
    note: Callable[[Event, float], None]
    after: str
    heard_s: float
    is_over: threading.Event = field(default_factory=threading.Event)


class SharedReader:
    """One thread, which ends when `stopping` is set. A request that is silent for `patience_s` is
    given up."""

    def __init__(
        self,
        producer: Producer,
        *,
        patience_s: float,
        stopping: threading.Event,
        clock: Callable[[], float],
    ) -> None:
        self._producer = producer
        self._patience_s = patience_s
        self._stopping = stopping
        self._clock = clock
        self._lock = threading.Lock()
        self._followed: dict[str, _Followed] = {}
        self._some = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="load-reader", daemon=True)
        self._thread.start()

    def follow(self, request_id: str, after: str, note: Callable[[Event, float], None]) -> None:
        """Call `note` with each event after the event id `after`, and when it was heard.

        Returns after the final one, when it was given up, or when the reader stops. Raises what the
        reader died of.
        """
        mine = _Followed(note, after, self._clock())
        with self._lock:
            self._followed[request_id] = mine
            self._some.set()
        while not mine.is_over.wait(0.5):
            if self._stopping.is_set() or not self._thread.is_alive():
                break
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if self._some.wait(0.5):
                    self._read()
        except BaseException as error:
            self._failure = error
            raise

    def _read(self) -> None:
        with self._lock:
            after = {request_id: item.after for request_id, item in self._followed.items()}
        try:
            found = self._producer.new_events(after, wait_ms=WAIT_MS)
        except TransientError:
            self._stopping.wait(RETRY_S)  # a store that is away: go on after it
            found = {}
        now_s = self._clock()
        for request_id, events in found.items():
            item = self._followed[request_id]
            for event in events:
                item.after, item.heard_s = event.event_id, now_s
                item.note(event, now_s)
                if isinstance(event, FinalEvent):
                    self._end(request_id)
        for request_id, item in list(self._followed.items()):
            if now_s - item.heard_s > self._patience_s:
                self._end(request_id)

    def _end(self, request_id: str) -> None:
        with self._lock:
            item = self._followed.pop(request_id)
            if not self._followed:
                self._some.clear()
        item.is_over.set()
