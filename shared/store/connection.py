"""Connections to Redis by URL, and what their errors mean. Knows no key and no value.

Three roles, each a URL that defaults to the first: *meta* (ledger, events, presence), *kv* (KV
pages) and *weights* (manifests, layouts, segments). A command is sent again when its reply does not
come, a bounded number of times with jittered back-off, so every write in this package can be
repeated. No exception of redis-py leaves the package:

    no connection, no reply in time              StoreUnavailable, naming host and port
    OOM, MISCONF, READONLY, LOADING, any refusal StoreUnavailable, naming the reason
    WRONGTYPE, a script that a value breaks      StoreDamaged: another try would fail again
    wrong password, no permission, malformed URL ConfigError

Longer than other modules: every way in which a server can fail is named here.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis
from redis.backoff import EqualJitterBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from shared.errors import CellpipeError, ConfigError, StoreDamaged, StoreUnavailable
from shared.store.embedded import embedded_client
from shared.store.scripts import Script

DEFAULT_PORT = 6379
MEMORY_SCHEMES = ("memory", "fakeredis")
_OOM = "its memory is full (OOM)"
# redis-py has a class for some replies and cuts the code off their text.
_REASONS_BY_CLASS: dict[type[RedisError], str] = {
    ReadOnlyError: "it is a read-only replica (READONLY)",
    BusyLoadingError: "it is still loading its data (LOADING)",
    MovedError: "it is a node of a Redis Cluster (MOVED)",
}
_REASONS_BY_CODE = {
    "MISCONF": "it cannot save to its disk (MISCONF)",
    "BUSY": "it is busy with a long script (BUSY)",
}

# A value of another type than its command is for, or one that our script cannot compute with.
_CONNECTING = re.compile(r"^Error (-?\d+ )?connecting to \S+ ")
_DAMAGE_MARKS = ("WRONGTYPE", "user_script:", "Error running script", "ID specified in XADD")

Argument = str | bytes | memoryview | int
Command = Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Call:
    """A script with its keys and arguments; stands wherever a command does."""

    script: Script
    keys: Sequence[str]
    args: Sequence[Argument] = ()

    def command(self) -> Command:
        return ("EVALSHA", self.script.sha1, len(self.keys), *self.keys, *self.args)


class StoreFull(StoreUnavailable):
    """The server refuses writes because its memory is full."""


class Connection:
    """One Redis server. May be used from any thread. Replies are those of RESP2: bytes, int, list.

    `name` is host:port, without user and password.
    """

    def __init__(
        self, client: redis.Redis, name: str, timeout_s: float, *, sends_ahead: bool = True
    ) -> None:
        """`sends_ahead` where a command can be sent and its reply be read later."""
        # redis-py's conversions differ between its versions; the protocol's replies do not.
        client.response_callbacks.clear()
        self._client = client
        self._execute: Callable[..., Any] = client.execute_command
        self.name = name
        self.timeout_s = timeout_s
        self._has_served = False
        self._sends_ahead = sends_ahead

    def run(self, command: Command | Call) -> Any:
        """The reply to one command."""
        with self._errors():
            if isinstance(command, Call):
                try:
                    return self._execute(*command.command())
                except NoScriptError:
                    self._load((command,))
                    return self._execute(*command.command())
            return self._execute(*command)

    def run_all(
        self,
        commands: Sequence[Command | Call],
        *,
        keep: tuple[type[CellpipeError], ...] = (),
    ) -> list[Any]:
        """The replies to commands sent in one round trip. They are not one transaction.

        Raises the first error, but returns those of the classes `keep` in place of their replies.
        """
        if not commands:
            return []
        with self._errors():
            replies = self._send(commands)
            if any(isinstance(reply, NoScriptError) for reply in replies):
                self._load([c for c in commands if isinstance(c, Call)])
                replies = self._send(commands)
            return self._kept(replies, keep)

    def start_all(
        self,
        commands: Sequence[Command | Call],
        *,
        keep: tuple[type[CellpipeError], ...] = (),
    ) -> Callable[[], list[Any]]:
        """`run_all` in two halves: this one sends, and what it returns waits for the replies.

        That is to be called once. Commands whose replies do not come are sent again by it. If
        nobody waits, the replies are lost with the connection they were to come by.
        """
        line = self._send_ahead(commands) if self._sends_ahead and commands else None
        if line is None:
            replies = self.run_all(commands, keep=keep)
            return lambda: replies

        def wait() -> list[Any]:
            unwaited.detach()
            replies = self._read(line, len(commands))
            if replies is None or any(isinstance(reply, NoScriptError) for reply in replies):
                return self.run_all(commands, keep=keep)
            with self._errors():
                return self._kept(replies, keep)

        unwaited = weakref.finalize(wait, _abandon, self._client.connection_pool, line)
        unwaited.atexit = False
        return wait

    def ping(self) -> None:
        """Raise `StoreUnavailable` unless the server answers."""
        self.run(("PING",))

    def close(self) -> None:
        self._client.close()

    def _kept(self, replies: list[Any], keep: tuple[type[CellpipeError], ...]) -> list[Any]:
        """The replies with errors of the classes `keep` in their place; raises the first other."""
        for number, reply in enumerate(replies):
            if not isinstance(reply, Exception):
                continue
            error = self._meaning(reply) if isinstance(reply, RedisError) else reply
            if not isinstance(error, keep):
                raise reply
            replies[number] = error
        return replies

    def _send_ahead(self, commands: Sequence[Command | Call]) -> Any:
        """The redis-py connection that they left by; None if they did not."""
        pool = self._client.connection_pool
        try:
            line = pool.get_connection()
        except RedisError:
            return None
        send: Callable[[Any], None] = line.send_packed_command
        pack: Callable[[Any], Any] = line.pack_commands
        try:
            send(pack(map(_command, commands)))
        except RedisError:
            pool.release(line)
            return None
        return line

    def _read(self, line: Any, num_replies: int) -> list[Any] | None:
        """Replies that are on their way; None when they do not come. Gives the line back."""
        replies: list[Any] = []
        try:
            for _ in range(num_replies):
                try:
                    replies.append(line.read_response())
                except ResponseError as error:
                    replies.append(error)
        except RedisError:  # redis-py has closed it
            return None
        finally:
            self._client.connection_pool.release(line)
        return replies

    def _send(self, commands: Sequence[Command | Call]) -> list[Any]:
        if len(commands) == 1:  # a pipeline of one takes half as much CPU again
            try:
                return [self._execute(*_command(commands[0]))]
            except ResponseError as error:
                return [error]
        pipeline = self._client.pipeline(transaction=False)
        queue: Callable[..., Any] = pipeline.execute_command
        for command in commands:
            queue(*_command(command))
        return pipeline.execute(raise_on_error=False)

    def _load(self, calls: Sequence[Call]) -> None:
        for source in {call.script.source for call in calls}:
            self._execute("SCRIPT LOAD", source)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RedisError as error:
            raise self._meaning(error) from error
        self._has_served = True

    def _meaning(self, error: RedisError) -> CellpipeError:
        if isinstance(error, AuthenticationError | AuthorizationError | NoPermissionError):
            # Whoever was served before has the right URL: somebody is at work on the server, and a
            # process that ended over it would not be started again.
            kind = StoreUnavailable if self._has_served else ConfigError
            return kind(
                f"Redis at {self.name} refuses us: {error}",
                remedy="check user and password in the Redis URL",
            )
        if isinstance(error, OutOfMemoryError):
            return StoreFull(
                f"Redis at {self.name}: {_OOM}",
                remedy="raise its maxmemory, or admit fewer requests",
            )
        if isinstance(error, RedisTimeoutError):
            return StoreUnavailable(
                f"no answer from Redis at {self.name} within {self.timeout_s:g} s"
            )
        text = str(error)
        reason = _REASONS_BY_CLASS.get(type(error)) or _REASONS_BY_CODE.get(text.split(" ")[0])
        if reason is not None:
            return StoreUnavailable(f"Redis at {self.name}: {reason}")
        if isinstance(error, ResponseError):
            if any(mark in text for mark in _DAMAGE_MARKS):
                return StoreDamaged(f"Redis at {self.name} holds a damaged value: {text:.300}")
            return StoreUnavailable(f"Redis at {self.name} refuses: {text:.300}")
        if isinstance(error, RedisConnectionError):
            why = _CONNECTING.sub("", text).rstrip(".")  # it begins with the address once more
            return StoreUnavailable(
                f"no connection to Redis at {self.name}: {why:.300}",
                remedy="check that the server runs and that the Redis URL is right",
            )
        return StoreUnavailable(f"Redis at {self.name}: {text:.300}")


@dataclass(frozen=True, slots=True)
class Stores:
    """The three roles; two may be the same connection.

    `keep_answers_s` is how long the records of requests are kept after their end.
    """

    meta: Connection
    kv: Connection
    weights: Connection
    keep_answers_s: float = 3_600.0

    def ping(self) -> None:
        """Raise `StoreUnavailable` unless every server answers."""
        for connection in {self.meta, self.kv, self.weights}:
            connection.ping()

    def close(self) -> None:
        for connection in {self.meta, self.kv, self.weights}:
            connection.close()


def connect(
    meta_url: str,
    kv_url: str | None = None,
    weights_url: str | None = None,
    *,
    timeout_s: float = 5.0,
    max_retries: int = 3,
    keep_answers_s: float = 3_600.0,
) -> Stores:
    """Connections to the given URLs; equal URLs share one. Nothing is sent yet: see `Stores.ping`.

    URLs are redis://[user:password@]host[:port][/db], rediss:// for TLS, or memory:// for a server
    inside this process, a new and empty one for every call. Raises `ConfigError` for anything else.
    """
    connections: dict[str, Connection] = {}
    roles = {"meta": meta_url, "kv": kv_url or meta_url, "weights": weights_url or meta_url}
    for role, url in roles.items():
        if url not in connections:
            connections[url] = _connect_one(role, url, timeout_s, max_retries)
    connected = {role: connections[url] for role, url in roles.items()}
    return Stores(**connected, keep_answers_s=keep_answers_s)


def _connect_one(role: str, url: str, timeout_s: float, max_retries: int) -> Connection:
    def refuse(reason: str) -> ConfigError:
        # The URL itself may hold a password.
        return ConfigError(
            f"the {role} Redis URL {_without_password(url)!r} {reason}",
            remedy="write it as redis://[user:password@]host[:port][/db]",
        )

    try:
        parts = urlsplit(url)
        port = parts.port or DEFAULT_PORT
    except ValueError:  # its text may quote a password that holds a slash
        raise refuse("is malformed: host or port cannot be read") from None
    if parts.scheme in MEMORY_SCHEMES:
        return Connection(embedded_client(), "memory", timeout_s, sends_ahead=False)
    if parts.scheme not in ("redis", "rediss"):
        raise refuse("must start with redis://, rediss:// or memory://")
    if not parts.hostname:
        raise refuse("names no host")
    if not (database := parts.path.strip("/") or "0").isdecimal():
        raise refuse("must end in a database number")
    if parts.query or parts.fragment:
        raise refuse("has options, which are not supported")
    client = redis.Redis.from_url(
        f"{url.removesuffix(parts.path)}/{database}",
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        # 50 ms to 1 s: a restarting Redis is back within three, and threads do not come in step.
        retry=Retry(EqualJitterBackoff(cap=1.0, base=0.05), max_retries),
    )
    return Connection(client, f"{parts.hostname}:{port}", timeout_s)


def _abandon(pool: Any, line: Any) -> None:
    line.disconnect()
    pool.release(line)


def _command(command: Command | Call) -> Command:
    return command.command() if isinstance(command, Call) else command


def _without_password(url: str) -> str:
    scheme, separator, rest = url.rpartition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
