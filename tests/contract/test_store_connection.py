"""What becomes of a Redis that is full, gone, hung or not what the URL says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from shared.errors import ConfigError, StoreUnavailable
from shared.messages import SamplingParams
from shared.store.connection import StoreFull, connect
from shared.store.kv_pages import KvPages
from shared.store.ledger import Ledger
from shared.store.ledger_types import Commit, Committed, LedgerRecord
from shared.store.presence import Presence
from shared.store.presence_types import SchedulerInfo, WorkerInfo
from shared.topology import even_layout
from tests.contract.redis_server import RedisServer

LAYOUT = even_layout("tiny@0123", 4, 1)


class CannedServer:
    """A TCP server that gives one answer to every command; an empty one is silence."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"redis://ann:s3cret@127.0.0.1:{self.port}/0"
        self._thread = threading.Thread(target=self._serve)
        self._open = True
        self._thread.start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            with peer:
                if not self._open:
                    return
                while request := peer.recv(65536):
                    peer.sendall(self._answer * request.count(b"*"))

    def close(self) -> None:
        self._open = False
        socket.create_connection(("127.0.0.1", self.port)).close()
        self._thread.join(10)
        self._listener.close()


@pytest.fixture
def canned() -> Iterator[list[CannedServer]]:
    servers: list[CannedServer] = []
    yield servers
    for server in servers:
        server.close()


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (b"-MISCONF cannot persist\r\n", StoreUnavailable, "cannot save to its disk"),
        (b"-OOM command not allowed\r\n", StoreFull, "memory is full"),
        (b"-READONLY no\r\n", StoreUnavailable, "read-only replica"),
        (b"-LOADING dataset\r\n", StoreUnavailable, "still loading"),
        (b"-BUSY script\r\n", StoreUnavailable, "busy with a long script"),
        (b"-MOVED 1 127.0.0.1:1\r\n", StoreUnavailable, "node of a Redis Cluster"),
        (b"-ERR something else\r\n", StoreUnavailable, "refuses: something else"),
        (b"-WRONGPASS no\r\n", ConfigError, "refuses us"),
        (b"-NOAUTH no\r\n", ConfigError, "refuses us"),
        (b"-NOPERM no\r\n", ConfigError, "refuses us"),
        (b"HTTP/1.1 400 Bad Request\r\n", StoreUnavailable, "Redis at 127.0.0.1"),
    ],
)
def test_every_refusal_has_a_name_and_no_password(
    canned: list[CannedServer], answer: bytes, error: type[Exception], words: str
) -> None:
    server = CannedServer(answer)
    canned.append(server)
    url = server.url if error is ConfigError else server.url.replace("ann:s3cret@", "")

    with (
        closing(connect(url, timeout_s=2.0, max_retries=0)) as stores,
        pytest.raises(error, match=words) as caught,
    ):
        stores.ping()

    assert f"127.0.0.1:{server.port}" in str(caught.value)
    assert "s3cret" not in str(caught.value)


def test_silence_is_a_named_error_in_bounded_time(canned: list[CannedServer]) -> None:
    server = CannedServer(b"")
    canned.append(server)
    started = time.monotonic()

    with (
        closing(connect(server.url, timeout_s=0.1, max_retries=1)) as stores,
        pytest.raises(StoreUnavailable, match=f"127.0.0.1:{server.port} within 0.1 s"),
    ):
        stores.ping()

    assert time.monotonic() - started < 5


def test_no_server_is_a_named_error_without_the_password() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    with (
        closing(connect(f"redis://ann:s3cret@127.0.0.1:{port}", max_retries=1)) as stores,
        pytest.raises(StoreUnavailable, match=f"Redis at 127.0.0.1:{port}") as caught,
    ):
        stores.ping()

    assert "s3cret" not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:6379", "must start with redis://"),
        ("http://h", "must start with redis://"),
        ("", "must start with redis://"),
        ("redis://", "names no host"),
        ("redis://h:0x10", "is malformed"),
        ("redis://h:99999", "is malformed"),
        ("redis://h/one", "must end in a database number"),
        ("redis://h/0?socket_timeout=1", "has options"),
        ("redis://[::1", "is malformed"),
    ],
)
def test_a_wrong_url_is_a_config_error(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        connect("memory://", kv_url=url or "x")

    assert "the kv Redis URL" in str(caught.value)


def test_a_wrong_url_does_not_show_its_password() -> None:
    for url in ("redsi://ann:s3cret@box:1/0", "redis://ann:s3cret/x@box:1/0"):
        with pytest.raises(ConfigError) as caught:
            connect(url)

        assert "://box:1/0" in str(caught.value)
        assert "s3cret" not in str(caught.value)


def test_roles_default_to_one_connection() -> None:
    with (
        closing(connect("memory://")) as one,
        closing(connect("redis://a", "redis://b:1/2", "rediss://u:p@c")) as three,
    ):
        assert one.meta is one.kv is one.weights
        assert [c.name for c in (three.meta, three.kv, three.weights)] == [
            "a:6379",
            "b:1",
            "c:6379",
        ]


@pytest.mark.servers
def test_a_full_server_refuses_by_name_and_still_takes_heartbeats(
    private_redis: RedisServer,
) -> None:
    with closing(connect(private_redis.url)) as stores:
        presence, ledger = Presence(stores.meta, ttl_ms=60_000), Ledger(stores.meta)
        record = LedgerRecord("r", "m", "l", (1,), SamplingParams(seed=1), 9)
        Presence(stores.meta, ttl_ms=20_000).claim(LAYOUT, WorkerInfo("w0"), (1,))
        presence.scheduler_heartbeat(SchedulerInfo("s0"))
        ledger.admit(record)

        stores.meta.run(("CONFIG", "SET", "maxmemory", "1"))

        assert presence.heartbeat(LAYOUT, WorkerInfo("w0", num_steps=5)) is True
        presence.scheduler_heartbeat(SchedulerInfo("s0", num_requests=5))
        ttl_ms = stores.meta.run(("PTTL", "cellpipe:v1:{tiny@0123/even1}:worker:w0"))
        assert 20_000 < ttl_ms <= 60_000
        with pytest.raises(StoreFull, match="memory is full"):
            presence.scheduler_heartbeat(SchedulerInfo("new"))
        with pytest.raises(StoreUnavailable, match="memory is full"):
            ledger.commit("r", 0, 1, [5])
        with pytest.raises(StoreUnavailable, match="memory is full"):
            KvPages(stores.kv, "l", [8]).write("r", 0, 0, bytes(8))

        stores.meta.run(("CONFIG", "SET", "maxmemory", "0"))

        # Refused as a whole: nothing of the refused commit is left.
        assert ledger.events("r") == []
        assert ledger.commit("r", 0, 1, [6]) == Committed()


@pytest.mark.servers
def test_a_replica_refuses_by_name(private_redis: RedisServer) -> None:
    with closing(connect(private_redis.url)) as stores:
        stores.meta.run(("REPLICAOF", "127.0.0.1", "1"))

        with pytest.raises(StoreUnavailable, match="read-only replica"):
            stores.meta.run(("SET", "a", "b"))


@pytest.mark.servers
def test_a_restarted_server_is_found_again(private_redis: RedisServer) -> None:
    with closing(connect(private_redis.url)) as stores:
        ledger = Ledger(stores.meta)
        record = LedgerRecord("r", "m", "l", (1,), SamplingParams(seed=1), 9)
        ledger.admit(record)

        private_redis.stop()
        private_redis.start()

        # The connection and the script cache are gone with the old process.
        assert ledger.get("r") is None
        assert ledger.admit(record)
        assert ledger.commit("r", 0, 1, [6]) == Committed()


@pytest.mark.servers
def test_scripts_in_a_batch_are_loaded_when_the_server_forgot_them(
    private_redis: RedisServer,
) -> None:
    with closing(connect(private_redis.url)) as stores:
        pages = KvPages(stores.kv, "l", [8])
        pages.write("r", 0, 0, b"abcdefgh")
        stores.kv.run(("SCRIPT", "FLUSH"))

        pages.write("r", 0, 1, b"ijklmnop")

        assert pages.read("r", 0, 0, 2) == b"abcdefghijklmnop"


@pytest.mark.servers
def test_replies_are_read_when_they_are_asked_for_each_from_its_own_line(
    private_redis: RedisServer,
) -> None:
    with closing(connect(private_redis.url)) as stores:
        meta = stores.meta

        first = meta.start_all([("SET", "k", "1"), ("GET", "k")])
        second = meta.start_all([("GET", "k")])
        meta.run(("SET", "k", "2"))

        assert (second(), first()) == ([b"1"], [b"OK", b"1"])


@pytest.mark.servers
def test_commands_whose_replies_are_lost_are_sent_again(private_redis: RedisServer) -> None:
    with closing(connect(private_redis.url)) as stores:
        ledger = Ledger(stores.meta)
        ledger.admit(LedgerRecord("r", "m", "l", (1,), SamplingParams(seed=1), 9))
        stores.meta.run(("SCRIPT", "FLUSH"))

        sent_to_the_old = ledger.start_commits([Commit("r", 0, 1, [6])])
        private_redis.stop()
        private_redis.start()
        ledger.admit(LedgerRecord("r", "m", "l", (1,), SamplingParams(seed=1), 9))

        assert sent_to_the_old() == [Committed()]
        assert ledger.tokens("r") == [6]


@pytest.mark.servers
def test_lines_are_given_back_whatever_became_of_their_replies(private_redis: RedisServer) -> None:
    with closing(connect(private_redis.url)) as stores:
        for _ in range(20):
            stores.meta.start_all([("GET", "k")])()
            with pytest.raises(StoreUnavailable, match="refuses"):
                stores.meta.start_all([("NO-SUCH-COMMAND",)])()

        assert stores.meta.run(("CLIENT", "LIST")).count(b"\n") == 1


@pytest.mark.servers
def test_a_line_whose_replies_nobody_waits_for_is_closed(private_redis: RedisServer) -> None:
    with closing(connect(private_redis.url)) as stores:
        for _ in range(20):
            stores.meta.start_all([("SET", "k", "1"), ("PING",)])

        assert stores.meta.run(("GET", "k")) == b"1"
        assert not stores.meta._client.connection_pool._in_use_connections


@pytest.mark.servers
def test_a_stopped_server_is_given_up_after_bounded_retries(private_redis: RedisServer) -> None:
    with closing(connect(private_redis.url, max_retries=2)) as stores:
        stores.ping()
        private_redis.stop()
        started = time.monotonic()

        with pytest.raises(StoreUnavailable, match=f"Redis at 127.0.0.1:{private_redis.port}"):
            Ledger(stores.meta).get("r")

        assert time.monotonic() - started < 10


def test_a_server_that_refuses_whom_it_served_is_waited_for(private_redis: RedisServer) -> None:
    others_url = private_redis.url.replace("redis://", "redis://operator:secret@")
    with closing(connect(private_redis.url)) as stores, closing(connect(others_url)) as operator:
        stores.meta.run(("ACL", "SETUSER", "operator", "on", ">secret", "~*", "+@all"))
        operator.meta.run(("ACL", "SETUSER", "default", "-@all"))
        with pytest.raises(StoreUnavailable, match="refuses us"):
            stores.meta.run(("SET", "a", 1))
        with pytest.raises(StoreUnavailable, match="refuses us"):
            stores.meta.run_all([("SET", "a", 1), ("GET", "a")])
        with closing(connect(private_redis.url)) as newcomer, pytest.raises(ConfigError):
            newcomer.meta.run(("SET", "a", 1))

        operator.meta.run(("ACL", "SETUSER", "default", "+@all"))

        assert stores.meta.run(("SET", "a", 1)) == b"OK"
