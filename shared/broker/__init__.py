"""Messaging: the promises (`base`), RabbitMQ (`rabbitmq`, the only importer of pika), `memory`."""

from __future__ import annotations

from shared.broker.base import Broker
from shared.broker.memory import MemoryBroker, MemoryHub


def connect(url: str, *, hub: MemoryHub | None = None, connect_timeout_s: float = 10.0) -> Broker:
    """A broker for a URL: `amqp://` or `amqps://` a RabbitMQ, `memory://` this process.

    Memory brokers that shall share queues are given the same hub. Raises `ConfigError` for a
    malformed URL and `BrokerUnavailable` when nothing answers.
    """
    if url.startswith("memory:"):
        return MemoryBroker(hub or MemoryHub())
    # Late: the embedded mode needs no pika.
    from shared.broker.rabbitmq import RabbitmqBroker

    return RabbitmqBroker.connect(url, connect_timeout_s=connect_timeout_s)
