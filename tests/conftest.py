"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from services.loader.pull import default_cache_dir, resolve_model
from shared.errors import ModelError
from tests.servers import URL_VARIABLES, PrivateServers


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """SmolLM2-135M-Instruct in the user's cache, pulled if need be.

    Without a network its tests are skipped on a developer's machine; in CI they fail.
    """
    folder = os.environ.get("CELLPIPE_CACHE_DIR")
    try:
        return resolve_model("smollm2-135m", Path(folder) if folder else default_cache_dir())
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real model cannot be pulled: {error}")


@dataclass(frozen=True)
class Servers:
    amqp_url: str
    redis_url: str


@pytest.fixture(scope="session")
def private_servers() -> Iterator[PrivateServers]:
    """Servers that this test session started; nothing runs until a URL is asked for."""
    servers = PrivateServers()
    yield servers
    servers.close()


@pytest.fixture(scope="session")
def amqp_url(private_servers: PrivateServers) -> str:
    return os.environ.get(URL_VARIABLES["rabbitmq"]) or private_servers.url("rabbitmq")


@pytest.fixture(scope="session")
def redis_url(private_servers: PrivateServers) -> str:
    return os.environ.get(URL_VARIABLES["redis"]) or private_servers.url("redis")


@pytest.fixture(scope="session")
def servers(amqp_url: str, redis_url: str) -> Servers:
    return Servers(amqp_url, redis_url)


@pytest.fixture
def fresh_redis_url(redis_url: str) -> str:
    """The test Redis, emptied."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    return redis_url
