"""Stores of every variant for the contract suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.store.connection import Stores, connect
from tests.contract.redis_server import RedisServer


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.servers)])
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    """Empty stores: inside the process, and on a real server."""
    url = "memory://"
    if request.param == "redis":
        url = request.getfixturevalue("shared_redis").url
    stores = connect(url)
    stores.meta.run(("FLUSHALL",))
    yield stores
    stores.close()
