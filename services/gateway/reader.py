"""Follows the events of many requests with one thread and one read of the store at a time.

Hands them to feeds, which tasks of the event loop wait on. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable

import structlog

from shared.backoff import Backoff
from shared.errors import CellpipeError, TransientError
from shared.store.ledger_base import START, RequestLedger
from shared.store.ledger_types import Event, FinalEvent

log = structlog.get_logger()

BLOCK_MS = 25  # a request that came meanwhile is read with the next look
MAX_BACKLOG = 1024  # events that wait for a slow client; those after them stay in the store
PATIENCE_S = 60.0  # of failing reads, until those who wait hear of it


class Feed:
    """Events of some requests, for one task. `next` gives them in order, by request id."""

    def __init__(self, request_ids: Iterable[str], close: Callable[[Feed], None]) -> None:
        self.after = dict.fromkeys(request_ids, START)  # of those that have not ended
        self.backlog: deque[tuple[str, Event]] = deque()
        self.failure: CellpipeError | None = None
        self._close = close
        self._arrived = asyncio.Event()

    async def next(self, timeout_s: float) -> list[tuple[str, Event]]:
        """What has come, or what comes first within `timeout_s`; [] if nothing does.

        Raises `CellpipeError` when the store has not answered for a long time, or refuses us.
        """
        if not self.backlog:
            self._arrived.clear()
            if self.failure is None:
                try:
                    async with asyncio.timeout(timeout_s):
                        await self._arrived.wait()
                except TimeoutError:
                    return []
            if self.failure is not None:
                raise self.failure
        batch = list(self.backlog)
        self.backlog.clear()
        return batch

    def wake(self) -> None:
        """For whoever has put something in: let the task see it."""
        self._arrived.set()

    def close(self) -> None:
        self._close(self)


class EventReader:
    """One thread. `gather_s` is its pause after each read that brought something."""

    def __init__(self, ledger: RequestLedger, *, gather_s: float) -> None:
        self._ledger = ledger
        self._gather_s = gather_s
        self._feeds: set[Feed] = set()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._backoff = Backoff(first_s=0.05, max_s=2.0)
        self._failing_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="gateway-reader", daemon=True)

    def start(self) -> None:
        """Begin, for the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End with the current read."""
        self._stopping.set()
        with self._changed:
            self._changed.notify()
        self._thread.join(timeout=10)

    def open(self, request_ids: Iterable[str]) -> Feed:
        """Follow requests from their first event on."""
        feed = Feed(request_ids, self._discard)
        with self._changed:
            self._feeds.add(feed)
            self._changed.notify()
        return feed

    @property
    def num_feeds(self) -> int:
        return len(self._feeds)

    def turn(self, timeout_s: float) -> bool:
        """Read once what has come. Whether it brought anything."""
        with self._changed:
            feeds = [f for f in self._feeds if f.after and len(f.backlog) < MAX_BACKLOG]
            if not feeds:
                self._changed.wait(timeout_s)
                return False
        # Two may read one request, a stream and the one that resumes it: each from its own place.
        rounds: list[dict[str, Feed]] = []
        for feed in feeds:
            for request_id in feed.after:
                free = next((r for r in rounds if request_id not in r), None)
                if free is None:
                    rounds.append(free := {})
                free[request_id] = feed
        block_ms = BLOCK_MS if len(rounds) == 1 else 1
        has_come = False
        for owners in rounds:
            after = {request_id: feed.after[request_id] for request_id, feed in owners.items()}
            events = self._ledger.events_of(after, block_ms=block_ms)
            if events:
                has_come = True
                self._deliver([(owners[i], i, e) for i, e in events.items()])
        return has_come

    def _deliver(self, batch: list[tuple[Feed, str, list[Event]]]) -> None:
        for feed, request_id, events in batch:
            if isinstance(events[-1], FinalEvent):
                del feed.after[request_id]
            else:
                feed.after[request_id] = events[-1].event_id
        self._call(lambda: _hand_over(batch))

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                if self.turn(1.0) and self._gather_s:
                    self._stopping.wait(self._gather_s)
                self._backoff.reset()
                self._failing_s = 0.0
            except CellpipeError as error:
                wait_s = self._backoff.next_s()
                self._failing_s += wait_s
                log.warning("events_not_read", reason=str(error))
                if self._failing_s > PATIENCE_S or not isinstance(error, TransientError):
                    self._fail(error)
                self._stopping.wait(wait_s)

    def _fail(self, error: CellpipeError) -> None:
        with self._changed:
            feeds = list(self._feeds)

        def fail() -> None:
            for feed in feeds:
                feed.failure = error
                feed.wake()

        self._call(fail)

    def _call(self, what: Callable[[], None]) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._stopping.set()

    def _discard(self, feed: Feed) -> None:
        with self._changed:
            self._feeds.discard(feed)


def _hand_over(batch: list[tuple[Feed, str, list[Event]]]) -> None:
    for feed, request_id, events in batch:
        feed.backlog.extend((request_id, event) for event in events)
        feed.wake()
