"""Fixtures that several test folders share."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from services.loader.pull import default_cache_dir, resolve_model
from shared.broker.rabbitmq import RabbitmqBroker
from shared.errors import ModelError
from shared.topology import control_queues
from tests.contract.redis_server import RedisServer
from tests.servers import URL_VARIABLES, PrivateServers
from tests.tcp_proxy import TcpProxy
from tests.waiting import delete_queue, purge_queue


@pytest.fixture(autouse=True)
def empty_control_queues(request: pytest.FixtureRequest) -> None:
    """A test finds no request and no dead letter that another left on the shared broker."""
    if "amqp_url" in request.fixturenames:
        url = request.getfixturevalue("amqp_url")
        with closing(RabbitmqBroker.connect(url)) as broker:
            broker.declare(control_queues())
        for spec in control_queues():
            purge_queue(url, spec.name)


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


@pytest.fixture
def queue(amqp_url: str) -> Iterator[str]:
    """A name; its queue is deleted at the end, after the broker that would declare it again."""
    name = f"cellpipe.test.{uuid.uuid4().hex}"
    yield name
    delete_queue(amqp_url, name)


@pytest.fixture(params=[False, True], ids=["own-thread", "in-taker"])
def runs_in_taker(request: pytest.FixtureRequest) -> bool:
    """Both ways in which a broker's IO is done."""
    return bool(request.param)


@pytest.fixture
def broker(amqp_url: str, queue: str, runs_in_taker: bool) -> Iterator[RabbitmqBroker]:
    with closing(RabbitmqBroker.connect(amqp_url, runs_in_taker=runs_in_taker)) as broker:
        yield broker


@pytest.fixture
def proxy(amqp_url: str) -> Iterator[TcpProxy]:
    parts = urlsplit(amqp_url)
    with closing(TcpProxy(parts.hostname or "", parts.port or 0)) as proxy:
        yield proxy


@pytest.fixture
def proxied(proxy: TcpProxy, queue: str, runs_in_taker: bool) -> Iterator[RabbitmqBroker]:
    """A broker whose network the test can cut; confirms have 1 s."""
    with closing(
        RabbitmqBroker.connect(
            proxied_url(proxy), confirm_timeout_s=1.0, runs_in_taker=runs_in_taker
        )
    ) as broker:
        yield broker


@pytest.fixture(scope="session")
def own_servers() -> Iterator[PrivateServers]:
    """Servers that a test may kill and freeze, and leaves running."""
    with closing(PrivateServers()) as servers:
        yield servers


@pytest.fixture
def private_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server of this test's own, to be mistreated."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


def proxied_url(proxy: TcpProxy) -> str:
    return f"amqp://guest:guest@127.0.0.1:{proxy.port}/%2F"
