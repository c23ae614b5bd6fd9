"""Opens what a command talks to: the embedded pipeline, or a cluster. Only wires."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.cli.progress import StageBar
from services.cli.settings import DEFAULT_MODEL, with_cluster_urls
from shared.api.model import ApiModel
from shared.broker.base import Broker
from shared.config import Config
from shared.errors import ConfigError, StoreUnavailable, TransientError
from shared.kernel.weights import KernelBackend
from shared.producer import Producer
from shared.store.connection import Stores, connect
from shared.store.presence import Presence
from shared.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from services.embedded import Engine

NO_SCHEDULER_GRACE_S = 8.0  # more than a scheduler's presence lives without a heartbeat


@dataclass(frozen=True, slots=True)
class Session:
    """A producer and the model it speaks to. `check` raises if the pipeline has died.

    Of a cluster, an answer can be read by another process later: it `outlives_us`.
    """

    producer: Producer
    model: ApiModel
    check: Callable[[], None]
    outlives_us: bool = False

    @property
    def tokenizer(self) -> Tokenizer:
        return self.model.tokenizer

    @property
    def model_id(self) -> str:
        return self.model.model_id


@contextmanager
def open_session(
    config: Config,
    *,
    model: str,
    cluster: bool | None,
    num_groups: int,
    num_threads: int,
    prefix_cache: bool = True,
) -> Iterator[Session]:
    """The pipeline that a command asked for; closed at the end. Threads are the embedded one's.

    `model` "" is the one that was loaded last, or the default one in this process.
    """
    if cluster is None:
        cluster = bool(config.amqp_url or config.redis_url)
    if cluster and num_groups != 1:
        raise ConfigError("--groups is for the embedded pipeline; a cluster has its layout's")
    if cluster and not prefix_cache:
        raise ConfigError(
            "--no-prefix-cache is for the embedded pipeline",
            remedy="in a cluster: cellpipe scheduler --no-prefix-cache",
        )
    opened = (
        _cluster_session(config, model)
        if cluster
        else _embedded_session(
            config,
            model or DEFAULT_MODEL,
            num_groups=num_groups,
            num_threads=num_threads,
            prefix_cache=prefix_cache,
        )
    )
    with opened as session:
        yield session


@contextmanager
def _embedded_session(
    config: Config, model: str, *, num_groups: int, num_threads: int, prefix_cache: bool
) -> Iterator[Session]:
    with open_engine(
        config,
        model,
        num_groups=num_groups,
        num_threads=num_threads,
        prefix_cache=prefix_cache,
    ) as engine:
        model_of_api = ApiModel(
            tokenizer=engine.tokenizer,
            chat_template=engine.chat_template,
            model_id=engine.model_id,
            vocab_size=engine.config.vocab_size,
            max_positions=engine.config.max_position_embeddings,
        )
        yield Session(engine.producer, model_of_api, engine.check)


@contextmanager
def open_engine(
    config: Config, model: str, *, num_groups: int, num_threads: int, prefix_cache: bool
) -> Iterator[Engine]:
    """The pipeline of this process, with a model that is pulled and packed if need be."""
    from services.embedded import PREFIX_BYTES, Engine
    from services.loader.packed import open_model

    with StageBar() as bar:
        packed = open_model(model, config.cache_dir, progress=bar.show)
    backend = kernel_backend(config, num_threads)
    # Flipped bits would be wrong words without any other sign; 0.2 s for 100 MB.
    read_shard = functools.partial(packed.read_shard, verify=True)
    with Engine(
        packed.manifest,
        read_shard,
        backend,
        num_groups=num_groups,
        prefix_bytes=PREFIX_BYTES if prefix_cache else None,
    ) as engine:
        yield engine


@contextmanager
def _cluster_session(config: Config, model: str) -> Iterator[Session]:
    from services.scheduler.service import read_served_model
    from shared.store.ledger import Ledger
    from shared.store.shards import ShardStore
    from shared.topology import control_queues

    with open_cluster(config) as (broker, stores):
        served = read_served_model(ShardStore(stores.weights), model)
        broker.declare(control_queues())
        producer = Producer(broker, Ledger.of(stores), tokenizer=served.tokenizer)
        watch = _SchedulerWatch(Presence(stores.meta))
        model_of_api = ApiModel(
            tokenizer=served.tokenizer,
            chat_template=served.chat_template,
            model_id=served.layout.model_id,
            vocab_size=served.config.vocab_size,
            max_positions=served.config.max_position_embeddings,
        )
        yield Session(producer, model_of_api, watch.check, outlives_us=True)


class _SchedulerWatch:
    """Notices that nobody will take a request; asked about once a second of silence."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._missing_since_s: float | None = None

    def check(self) -> None:
        """Raise `TransientError` when no scheduler has lived for a while.

        While the store does not answer nothing is known of them, and they cannot tell that they
        live: whoever reads the answer notices, and waits for it.
        """
        try:
            is_served = bool(self._presence.schedulers())
        except StoreUnavailable:
            is_served = True
        if is_served:
            self._missing_since_s = None
            return
        now_s = time.monotonic()
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        if now_s - self._missing_since_s >= NO_SCHEDULER_GRACE_S:
            raise TransientError(
                "no scheduler runs; what was asked stays in its queue until one does",
                remedy="start one: cellpipe scheduler",
            )


@contextmanager
def open_cluster(config: Config, *, runs_in_taker: bool = False) -> Iterator[tuple[Broker, Stores]]:
    """Connections to RabbitMQ and Redis; closed at the end.

    `runs_in_taker` as in `RabbitmqBroker.connect`. Raises `ConfigError` without URLs,
    `BrokerUnavailable` or `StoreUnavailable` naming host and port when a server does not answer.
    """
    from shared.broker.rabbitmq import RabbitmqBroker

    with open_stores(config) as stores:
        config = with_cluster_urls(config)
        assert config.amqp_url is not None, "with_cluster_urls fills it in or raises"
        broker = RabbitmqBroker.connect(config.amqp_url, runs_in_taker=runs_in_taker)
        try:
            yield broker, stores
        finally:
            broker.close()


@contextmanager
def open_stores(config: Config) -> Iterator[Stores]:
    """Connections to Redis alone; closed at the end."""
    config = with_cluster_urls(config)
    assert config.redis_url is not None, "with_cluster_urls fills it in or raises"
    stores = connect(
        config.redis_url,
        config.redis_kv_url,
        config.redis_weights_url,
        keep_answers_s=config.keep_answers_s,
    )
    try:
        stores.ping()
        yield stores
    finally:
        stores.close()


def kernel_backend(config: Config, num_threads: int) -> KernelBackend:
    """The kernel that the settings ask for; one warning when it is the slow one by default.

    0 threads are as many as there are cores.
    """
    from shared.model.backend import pick_backend

    backend = pick_backend(config.kernel, num_threads=num_threads or len(os.sched_getaffinity(0)))
    if config.kernel == "auto" and backend.name == "reference":
        print(
            "cellpipe: warning: the C kernel is not built; NumPy computes the same, slowly.\n"
            "  Install a C compiler and Python's headers, then install cellpipe again.",
            file=sys.stderr,
        )
    return backend
