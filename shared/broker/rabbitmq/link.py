"""Connections that come back. All of it happens within callbacks of the loop.

Owns the two TCP connections and their back-off. Knows no queue and no message.
"""

from __future__ import annotations

import random
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pika
import pika.exceptions
import pika.frame
import structlog

from shared.broker.rabbitmq.frames import without_headers
from shared.broker.rabbitmq.io_loop import IoLoop

log = structlog.get_logger()

MIN_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
# One read takes what a socket holds: pika's own 4 KiB cost 4.3 ms of CPU for a body of 1 MiB.
READ_BYTES = 256 << 10
# What pika raises for a table of headers that it cannot hold.
_UNDECODED = (
    ArithmeticError,
    LookupError,
    OSError,
    RecursionError,
    ValueError,
    struct.error,
    pika.exceptions.InvalidFieldTypeException,
)


class Connection(pika.SelectConnection):  # type: ignore[misc]
    """pika's connection with large reads, one write per burst, and a bug less.

    It reaches into pika, which offers no setting for this: `_read_frame`, `_transport` and the
    transport's `_MAX_RECV_BYTES`, `_MAX_CONSUME_BYTES` and `_sock` exist in pika 1.4.4, and a
    version without them is merely slower.
    """

    def __init__(self, io: IoLoop, *arguments: Any, **options: Any) -> None:
        self._io = io
        self._held: list[bytes] = []
        self._plain_socket: Any = None
        super().__init__(*arguments, custom_ioloop=io.ioloop, **options)

    def tune(self) -> None:
        """Call once the connection is open."""
        if self._transport is None:
            return
        self._transport._MAX_RECV_BYTES = READ_BYTES
        if self.params.ssl_options is None:
            # Back to the poller after each read, instead of reading until EAGAIN is raised.
            self._transport._MAX_CONSUME_BYTES = 1
            self._plain_socket = getattr(self._transport, "_sock", None)

    def flush(self) -> None:
        """Write what was held back within a burst."""
        held, self._held = self._held, []
        if held and self._transport is not None and not self.is_closed:
            self._write(b"".join(held))

    def _output_marshaled_frames(self, marshaled_frames: Sequence[bytes]) -> None:
        # A message is three frames: as three writes they are three packets, for us and the broker.
        self.bytes_sent += sum(map(len, marshaled_frames))
        self.frames_sent += len(marshaled_frames)
        if self._io.holds(self):
            self._held += marshaled_frames
        else:
            self._write(b"".join(marshaled_frames))

    def _write(self, data: bytes) -> None:
        # Straight to the socket, which a detour through the poller would find free as well.
        if self._plain_socket is not None and not self._get_write_buffer_size():
            try:
                num_sent = self._plain_socket.send(data)
            except OSError:  # full, or broken: the transport waits, or finds out and tells
                num_sent = 0
            if num_sent == len(data):
                return
            data = data[num_sent:]
        self._io.has_unsent = True
        self._adapter_emit_data(data)

    def _read_frame(self) -> tuple[int, Any]:
        try:
            frame: tuple[int, Any] = super()._read_frame()
        except _UNDECODED as error:
            bare = without_headers(bytes(self._frame_buffer))
            if bare is None:
                raise
            log.warning("headers_dropped", reason=repr(error)[:200])
            num_bytes, whole = bare
            return num_bytes, pika.frame.decode_frame(whole)[1]
        return frame

    def _on_connection_workflow_done(self, conn_or_exc: Any) -> None:
        # pika 1.4.4 reports a close during the handshake with the class of its exception
        # instead of an instance, and then fails its own assertion.
        is_class = isinstance(conn_or_exc, type)
        super()._on_connection_workflow_done(conn_or_exc() if is_class else conn_or_exc)

    def abort(self) -> None:
        """Drop the TCP connection without a word, for a broker that does not answer."""
        if self._transport is not None and not self.is_closed:
            self._transport.abort()


class Link:
    """One connection that is opened again, after a jittered back-off, until it is closed for good.

    `on_up(connection)` and `on_down(reason)` are called in turn; `on_failed(error)` for each
    attempt that did not succeed.
    """

    def __init__(
        self,
        io: IoLoop,
        parameters: Callable[[], pika.ConnectionParameters],
        *,
        on_up: Callable[[Connection], None],
        on_down: Callable[[str], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._io = io
        self._parameters = parameters
        self._on_up = on_up
        self._on_down = on_down
        self._on_failed = on_failed
        self._connection: Connection | None = None
        self._closing = False
        self._num_failures = 0
        self._opened_at = 0.0
        self.ended = threading.Event()

    @property
    def is_up(self) -> bool:
        connection = self._connection
        return connection is not None and bool(connection.is_open)

    def open(self) -> None:
        if self._closing:
            return
        self._connection = Connection(
            self._io,
            self._parameters(),
            on_open_callback=self._opened,
            on_open_error_callback=self._failed,
            on_close_callback=self._closed,
        )

    def close(self) -> None:
        """Say goodbye to the broker and do not come back; `ended` is set when it is done."""
        self._closing = True
        connection = self._connection
        if connection is None:
            self.ended.set()
        elif not (connection.is_closing or connection.is_closed):
            connection.close()

    def abort(self) -> None:
        self._closing = True
        if self._connection is not None:
            self._connection.abort()

    def _opened(self, connection: Connection) -> None:
        self._opened_at = time.monotonic()
        connection.tune()
        self._on_up(connection)

    def _failed(self, connection: Connection, error: BaseException) -> None:
        self._connection = None
        self._on_failed(error)
        self._come_back()

    def _closed(self, connection: Connection, error: BaseException) -> None:
        self._connection = None
        if time.monotonic() - self._opened_at > MAX_BACKOFF_S:
            self._num_failures = 0  # it was good for a while; a link that flaps keeps backing off
        self._on_down(describe(error))
        self._come_back()

    def _come_back(self) -> None:
        if self._closing:
            self.ended.set()
            return
        delay_s = backoff_s(self._num_failures)
        self._num_failures += 1
        self._io.call_later(delay_s, self.open)


def backoff_s(num_failures: int) -> float:
    """Seconds until the next attempt: doubling up to `MAX_BACKOFF_S`, less up to half at random,
    so that a thousand workers do not come back in step."""
    longest_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** min(num_failures, 16))
    return longest_s * random.uniform(0.5, 1.0)


def root_cause(error: BaseException) -> BaseException:
    """The innermost reason of pika's nested connection errors."""
    for _ in range(8):
        nested = getattr(error, "exceptions", None) or [getattr(error, "exception", None)]
        inner = nested[-1] or (error.args[0] if error.args else None)
        if not isinstance(inner, BaseException):
            break
        error = inner
    return error


def describe(error: BaseException) -> str:
    """A reason in few words, without pika's nesting."""
    cause = root_cause(error)
    if isinstance(cause, pika.exceptions.ConnectionClosed | pika.exceptions.ChannelClosed):
        return f"{cause.reply_code} {cause.reply_text}"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause) or type(cause).__name__


def is_refusal(error: BaseException) -> bool:
    """Whether the broker refused user, password or virtual host: waiting will not help."""
    cause = root_cause(error)
    return isinstance(
        cause,
        pika.exceptions.AuthenticationError
        | pika.exceptions.ProbableAuthenticationError
        | pika.exceptions.ProbableAccessDeniedError,
    ) or (isinstance(cause, pika.exceptions.ConnectionClosed) and cause.reply_code in (403, 530))
