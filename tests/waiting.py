"""Waits of tests on real servers: bounded, and with a word for what did not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import pika

from shared.broker.base import Broker, Delivery
from shared.broker.rabbitmq import RabbitmqBroker
from shared.topology import Layout, group_queues

WAIT_S = 20.0


def take(broker: Broker) -> Delivery:
    delivery = broker.take(WAIT_S)
    assert delivery is not None, "nothing was delivered"
    return delivery


def wait_until(condition: Callable[[], bool], what: str, *, timeout_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.01)


def delete_queue(url: str, queue: str) -> None:
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        connection.channel().queue_delete(queue)


def purge_queue(url: str, queue: str) -> None:
    """Empty a queue that exists."""
    with pika.BlockingConnection(pika.URLParameters(url)) as connection:
        connection.channel().queue_purge(queue)


def empty_step_queues(url: str, layout: Layout) -> None:
    """Models of tests are the same, and so are their queues: a step may be left of another test."""
    with closing(RabbitmqBroker.connect(url)) as broker:
        broker.declare(group_queues(layout))
    for spec in group_queues(layout):
        purge_queue(url, spec.name)
