"""Stores of every variant for the contract suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shared.store.connection import Stores, connect
from tests.contract.redis_server import RedisServer


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@contextmanager
def open_stores(variant: str, request: pytest.FixtureRequest) -> Iterator[Stores]:
    """Empty stores: "memory" inside the process, "redis" on a real server."""
    url = request.getfixturevalue("shared_redis").url if variant == "redis" else "memory://"
    stores = connect(url)
    stores.meta.run(("FLUSHALL",))
    yield stores
    stores.close()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.servers)])
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    with open_stores(request.param, request) as stores:
        yield stores
