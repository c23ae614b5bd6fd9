"""What RabbitMQ and pika take with nothing of ours around them: the yardstick of a benchmark."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pika
import pika.exceptions

from shared.broker.rabbitmq.address import parse_address
from shared.broker.rabbitmq.control import queue_arguments
from shared.broker.rabbitmq.echo import STAMP_BYTES, read_through
from shared.errors import BrokerUnavailable
from shared.topology import QueueSpec, QueueType

EXPIRES_MS = 60_000
SILENCE_S = 10.0


def time_ping_pong(
    url: str, queue_type: QueueType, *, body_bytes: int, num_times: int
) -> list[float]:
    """Seconds from publish to delivery of a message that goes to a queue and comes straight back.

    One blocking connection, no confirm, no ack: less than any real hop. Raises `ConfigError` for a
    malformed URL, `BrokerUnavailable`.
    """
    name = f"cellpipe.raw.{secrets.token_hex(6)}"
    spec = QueueSpec(name, queue_type, expires_ms=EXPIRES_MS)
    body = bytes(body_bytes)
    properties = pika.BasicProperties(delivery_mode=1)
    times = []
    try:
        with pika.BlockingConnection(parse_address(url).parameters("raw", heartbeat_s=60)) as link:
            channel = link.channel()
            channel.queue_declare(name, durable=True, arguments=queue_arguments(spec))
            came = channel.consume(name, auto_ack=True, inactivity_timeout=SILENCE_S)
            for _ in range(num_times):
                began_s = time.perf_counter()
                channel.basic_publish("", name, body, properties)
                if next(came)[0] is None:
                    raise BrokerUnavailable(f"a message did not come back within {SILENCE_S:g} s")
                times.append(time.perf_counter() - began_s)
            channel.cancel()
            channel.queue_delete(name)
    except pika.exceptions.AMQPError as error:
        raise BrokerUnavailable(f"RabbitMQ went away while it was measured: {error!r}") from error
    return times


def time_hops(
    url: str, queue_type: QueueType, *, body_bytes: int, num_times: int, read_bytes: int = 0
) -> list[float]:
    """Seconds of a message's way from one process to another.

    One blocking connection each, no confirm, no ack. Both read `read_bytes` of memory before each
    message, as a worker reads its weights: what pika needs has left the caches then. Raises
    `ConfigError` for a malformed URL, `BrokerUnavailable`.
    """
    there, back = (f"cellpipe.raw.{secrets.token_hex(6)}" for _ in range(2))
    weights = np.ones(read_bytes, np.uint8)
    properties = pika.BasicProperties(delivery_mode=1)
    times = []
    try:
        with pika.BlockingConnection(parse_address(url).parameters("raw", heartbeat_s=60)) as link:
            channel = link.channel()
            for name in (there, back):
                spec = QueueSpec(name, queue_type, expires_ms=EXPIRES_MS)
                channel.queue_declare(name, durable=True, arguments=queue_arguments(spec))
            came = channel.consume(back, auto_ack=True, inactivity_timeout=SILENCE_S)
            with _echo(url, there, back, read_bytes):
                for number in range(-1, num_times):
                    read_through(weights)
                    channel.basic_publish("", there, bytes(body_bytes), properties)
                    method, _, body = next(came)
                    arrived_ns = time.time_ns()
                    if method is None or body is None:
                        raise BrokerUnavailable(f"no answer came within {SILENCE_S:g} s")
                    if number >= 0:  # the first waits until the other process is there
                        sent_ns = int.from_bytes(body[:STAMP_BYTES], "big")
                        times.append((arrived_ns - sent_ns) / 1e9)
            channel.cancel()
            for name in (there, back):
                channel.queue_delete(name)
    except pika.exceptions.AMQPError as error:
        raise BrokerUnavailable(f"RabbitMQ went away while it was measured: {error!r}") from error
    return times


@contextmanager
def _echo(url: str, source: str, target: str, read_bytes: int) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shared.broker.rabbitmq.echo"], stdin=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(f"{url}\n{source}\n{target}\n{read_bytes}\n")
        process.stdin.flush()
        yield
    finally:
        process.communicate()


def time_flood(url: str, queue_type: QueueType, *, body_bytes: int, num_times: int) -> float:
    """Seconds for so many messages into a queue and out of it, one blocking connection, no confirm.

    Raises `ConfigError` for a malformed URL, `BrokerUnavailable`.
    """
    name = f"cellpipe.raw.{secrets.token_hex(6)}"
    spec = QueueSpec(name, queue_type, expires_ms=EXPIRES_MS)
    body = bytes(body_bytes)
    properties = pika.BasicProperties(delivery_mode=1)
    try:
        with pika.BlockingConnection(parse_address(url).parameters("raw", heartbeat_s=60)) as link:
            channel = link.channel()
            channel.queue_declare(name, durable=True, arguments=queue_arguments(spec))
            began_s = time.perf_counter()
            for _ in range(num_times):
                channel.basic_publish("", name, body, properties)
            came = channel.consume(name, auto_ack=True, inactivity_timeout=SILENCE_S)
            for _ in range(num_times):
                if next(came)[0] is None:
                    raise BrokerUnavailable(f"a message did not come back within {SILENCE_S:g} s")
            spent_s = time.perf_counter() - began_s
            channel.cancel()
            channel.queue_delete(name)
    except pika.exceptions.AMQPError as error:
        raise BrokerUnavailable(f"RabbitMQ went away while it was measured: {error!r}") from error
    return spent_s
