"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import redis

from tests.servers import URL_VARIABLES, PrivateServers


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
