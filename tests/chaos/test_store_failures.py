"""What other systems' users reported of their Redis, as tests (`docs/failure-model.md`)."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from services.loader.packed import open_packed
from services.loader.upload import load_model
from shared.errors import StoreUnavailable
from shared.messages import SamplingParams
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import AlreadyCommitted, Committed, LedgerRecord, TokenEvent
from shared.store.presence import Presence
from shared.store.presence_types import WorkerInfo
from shared.store.shards import ShardStore
from shared.topology import even_layout
from tests.contract.redis_server import RedisServer
from tests.gguf_files import TinyModel, write_gguf
from tests.tcp_proxy import TcpProxy
from tests.waiting import wait_until

pytestmark = pytest.mark.servers

RECORD = LedgerRecord("r", "m", "l", (1, 2, 3), SamplingParams(seed=1), max_position=90)


@pytest.fixture
def redis_path(private_redis: RedisServer) -> Iterator[TcpProxy]:
    """The way to a Redis of this test's own, which can be stalled."""
    with closing(TcpProxy("127.0.0.1", private_redis.port)) as proxy:
        yield proxy


def test_redis_stall_in_commit_keeps_counters_exact(
    private_redis: RedisServer, redis_path: TcpProxy
) -> None:
    url = f"redis://127.0.0.1:{redis_path.port}/0"
    with closing(connect(url, timeout_s=0.3)) as stores, closing(connect(private_redis.url)) as eye:
        ledger, direct = Ledger(stores.meta), Ledger(eye.meta)
        ledger.admit(RECORD)
        for position in range(3, 13):
            stalled = position % 3 == 1
            if stalled:
                # The command is run and its reply does not come: redis-py sends it again.
                redis_path.stall(replies_only=True)
                threading.Timer(0.4, redis_path.heal).start()

            result = ledger.commit("r", 0, position, [100 + position])

            expected = AlreadyCommitted((100 + position,), None) if stalled else Committed()
            assert result == expected
        events = direct.events("r")
        state = direct.states(["r"])["r"]

    assert [(e.position, e.token_id) for e in events if isinstance(e, TokenEvent)] == [
        (position, 100 + position) for position in range(3, 13)
    ]
    assert state.committed_position == 12


@pytest.mark.parametrize("num_workers", [8])
def test_cold_start_of_many_workers_stays_within_budget(
    private_redis: RedisServer, tmp_path: Path, num_workers: int
) -> None:
    packed = open_packed(
        write_gguf(tmp_path / "m.gguf", TinyModel(hidden=512, inner=1536, layers=8)), tmp_path
    )
    manifest = packed.manifest
    with closing(connect(private_redis.url)) as stores:
        load_model(packed, ShardStore(stores.weights), even_layout(manifest.model_id, 8, 1))
        stores.meta.run(("CONFIG", "RESETSTAT"))
        before = _memory(private_redis, "used_memory")
        errors: list[BaseException] = []

        def start() -> None:
            try:
                with closing(connect(private_redis.url)) as own:
                    for shard in manifest.shards:
                        ShardStore(own.weights).read_shard(manifest, shard.name)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=start) for _ in range(num_workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        peak = _memory(private_redis, "used_memory_peak")

    total = sum(shard.num_bytes for shard in manifest.shards)
    assert not errors
    # Each reader has one reply of one segment (at most 1 MiB) on the way, not its whole model.
    assert peak - before < num_workers * (2 << 20)
    assert num_workers * total > 4 * num_workers * (2 << 20), "the model is too small to tell"


def _memory(server: RedisServer, name: str) -> int:
    with closing(connect(server.url)) as stores:
        info: bytes = stores.meta.run(("INFO", "memory"))
    (line,) = [x for x in info.decode().splitlines() if x.startswith(f"{name}:")]
    return int(line.partition(":")[2])


def test_redis_refusing_writes_fails_fast_with_a_named_error_and_resumes(
    private_redis: RedisServer,
) -> None:
    with closing(connect(private_redis.url)) as stores:
        ledger = Ledger(stores.meta)
        ledger.admit(RECORD)
        stores.meta.run(("CONFIG", "SET", "save", "3600 1"))
        shutil.rmtree(
            private_redis.folder
        )  # its disk is gone: snapshots fail, and it stops taking writes
        stores.meta.run(("BGSAVE",))
        wait_until(lambda: _last_save_failed(private_redis), "the snapshot fails")
        began = time.monotonic()

        with pytest.raises(StoreUnavailable, match="cannot save to its disk"):
            ledger.commit("r", 0, 3, [5])

        assert time.monotonic() - began < 1.0
        assert ledger.states(["r"])["r"].committed_position == 2  # reads go on
        stores.meta.run(("CONFIG", "SET", "save", ""))
        assert ledger.commit("r", 0, 3, [5]) == Committed()


def _last_save_failed(server: RedisServer) -> bool:
    with closing(connect(server.url)) as stores:
        return b"rdb_last_bgsave_status:err" in stores.meta.run(("INFO", "persistence"))


def test_rejoin_counts_once_and_no_ghost_outlives_its_ttl(private_redis: RedisServer) -> None:
    layout = even_layout("tiny@0123", 4, 2)
    with closing(connect(private_redis.url)) as stores:
        presence = Presence(stores.meta, ttl_ms=400)
        worker = WorkerInfo("w1")
        presence.claim(layout, worker, (1, 1), wanted=(1,))
        presence.claim(layout, worker, (1, 1), wanted=(1,))  # it was restarted under its name
        assert presence.coverage(layout) == [0, 1]

        presence.release("w1", layout)
        assert presence.coverage(layout) == [0, 0]
        presence.claim(layout, worker, (1, 1), wanted=(1,))
        assert presence.coverage(layout) == [0, 1]
        began = time.monotonic()  # now it dies without a word

        wait_until(lambda: presence.coverage(layout) == [0, 0], "the ghost is gone")

        assert time.monotonic() - began < 0.8
        assert presence.workers(layout) == []
        presence.claim(layout, worker, (1, 1), wanted=(1,))
        assert presence.coverage(layout) == [0, 1]
