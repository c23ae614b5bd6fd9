"""Runs pika's ioloop: every callback under one lock, in the order in which it was posted.

Owns who runs the loop when, and that what one burst of callbacks sends leaves as one packet a
connection. Knows no connection, queue or message.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import pika.exceptions
import structlog
from pika.adapters.select_connection import IOLoop

log = structlog.get_logger()

# What arrived since the last pass of so long ago can wait for the next one.
FRESH_S = 0.0005
# How often the loop's own thread looks in while the loop's owner is busy elsewhere, and how long
# it stays away at most where it finds the owner there, time after time. Heartbeats are due every
# few seconds.
LOOK_IN_S, STAY_AWAY_S = 0.005, 0.1


class Sink(Protocol):
    """Holds back what is written within a burst."""

    def flush(self) -> None: ...


class IoLoop:
    """The only way to a pika connection, for any thread.

    A thread of its own runs the loop. With `runs_in_owner` it does so only now and then: the
    owner, which is the thread that made the loop or called `own` last, runs it whenever it waits,
    and what a thread posts runs at once in that thread. So a message on its way wakes one thread
    and not two. The owner must be a thread that no exception of a signal handler interrupts, for
    pika does not survive one between two of its lines.
    """

    def __init__(self, on_ended: Callable[[], None], *, runs_in_owner: bool = False) -> None:
        self.ioloop = IOLoop()
        self.before_flush: list[Callable[[], None]] = []  # at the end of every burst
        self.has_unsent = False  # bytes for a socket that only a pass of the loop can send
        self._runs_in_owner = runs_in_owner
        self._owner = threading.get_ident()
        self._turn = threading.Lock()  # held by whoever runs callbacks
        self._posted: deque[Callable[[], None]] = deque()
        self._sinks: list[Sink] = []
        self._in_burst = False
        self._awake = False
        self._stopping = False
        self._told_to_stop = threading.Event()
        self._passed_s = 0.0  # when the last pass ended
        self._on_ended = on_ended
        self._thread = threading.Thread(target=self._run, name="cellpipe-amqp", daemon=True)

    def start(self) -> None:
        if self._runs_in_owner:
            self.ioloop.activate_poller()
        self._thread.start()

    def own(self) -> None:
        """This thread is the owner from now on."""
        self._owner = threading.get_ident()

    def post(self, callback: Callable[[], None]) -> None:
        """Run the callback, soon and in order, with the loop's lock. Never blocks."""
        self._posted.append(callback)
        if self._runs_in_owner and self._run_posted():
            return
        if not self._awake:  # a wake-up costs a system call: one for a burst is enough
            self._awake = True
            self.ioloop.add_callback_threadsafe(self._drain)

    def post_late(self, callback: Callable[[], None]) -> None:
        """As `post`, but from the owner it may wait until the owner waits, posts or takes."""
        if self._runs_in_owner and threading.get_ident() == self._owner:
            self._posted.append(callback)
        else:
            self.post(callback)

    def run_until(self, is_done: Callable[[], bool], timeout_s: float) -> None:
        """For the owner: run the loop until `is_done`, for at most `timeout_s`.

        Returns at once when another thread is to run it: wait for that one's word then.
        """
        if not self._runs_in_owner or threading.get_ident() != self._owner:
            return
        if timeout_s <= 0.0:
            if time.monotonic() - self._passed_s > FRESH_S:
                self._look_in()
            return
        until_s = time.monotonic() + timeout_s
        if not self._take_turn(timeout_s):
            return
        try:
            self._drain()
            # It rings after `until_s`, or the last poll would wait for whatever comes next.
            alarm = self.ioloop.call_later(max(0.0, until_s - time.monotonic()), _nothing)
            while not (is_done() or self._stopping or time.monotonic() >= until_s):
                self._pass()
            self.ioloop.remove_timeout(alarm)
        finally:
            self._turn.release()
        self._run_posted()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Within a callback only."""
        self.ioloop.call_later(delay_s, lambda: _run_if_open(callback))

    def holds(self, sink: Sink) -> bool:
        """Whether a burst runs: then `sink` is flushed at its end. Within a callback only."""
        if self._in_burst and sink not in self._sinks:
            self._sinks.append(sink)
        return self._in_burst

    def stop(self, timeout_s: float) -> None:
        """End the loop; afterwards what is posted is never run."""
        self._stopping = True
        self._told_to_stop.set()
        self.ioloop.add_callback_threadsafe(self.ioloop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            with self._turn:
                self.ioloop.close()

    def _take_turn(self, timeout_s: float = 0.0) -> bool:
        """Whether this thread may run callbacks now, to release the lock afterwards."""
        if not self._turn.acquire(timeout=timeout_s):
            return False
        if self._stopping:  # since we last looked; the loop may be closed by now
            self._turn.release()
            return False
        return True

    def _run_posted(self) -> bool:
        """Run what is posted now, unless another thread runs callbacks: that one then does."""
        while self._posted and not self._stopping:
            if not self._take_turn():
                return False
            try:
                self._drain()
                if self.has_unsent:
                    self._pass_at_once()
            finally:
                self._turn.release()
            # Who posted in between found the lock taken: once more.
        return True

    def _drain(self) -> None:
        self._awake = False  # before the first callback: what is posted from now on wakes us again
        if not self._posted:
            return
        self._in_burst = True
        try:
            while self._posted:
                _run_if_open(self._posted.popleft())
            for callback in self.before_flush:
                _run_if_open(callback)
        except BaseException:  # a bug in a callback: nobody may wait for us for ever
            self._stopping = True
            raise
        finally:
            self._in_burst = False
            sinks, self._sinks = self._sinks, []
            for sink in sinks:
                _run_if_open(sink.flush)

    def _pass_at_once(self) -> None:
        self.ioloop.call_later(0.0, _nothing)  # so that the poll does not wait
        self._pass()

    def _pass(self) -> None:
        """Wait for IO or a timer, and run what is due. Holds the lock."""
        self.has_unsent = False
        try:
            self.ioloop.poll()
            self.ioloop.process_timeouts()
            self._passed_s = time.monotonic()
        except BaseException:
            self._stopping = True
            raise

    def _run(self) -> None:
        try:
            if not self._runs_in_owner:
                with self._turn:
                    self.ioloop.start()
                return
            pause_s = LOOK_IN_S
            while not self._stopping:
                self._told_to_stop.wait(pause_s)
                pause_s = LOOK_IN_S if self._look_in() else min(2 * pause_s, STAY_AWAY_S)
        finally:
            self._stopping = True
            self._on_ended()

    def _look_in(self) -> bool:
        """Run what is due, unless another thread does."""
        if not self._take_turn():
            return False
        try:
            self._drain()
            self._pass_at_once()
        finally:
            self._turn.release()
        return True


def _nothing() -> None:
    pass


def _run_if_open(callback: Callable[[], None]) -> None:
    """Run a callback that may find its connection closing: between the broker's goodbye and the
    end of the socket pika refuses everything. The loss is told right after, and makes it good."""
    try:
        callback()
    except (
        pika.exceptions.ConnectionWrongStateError,
        pika.exceptions.ChannelWrongStateError,
    ) as error:
        log.debug("connection_closing", reason=str(error))
