"""Answers every message of one queue with one to another, with pika alone: the far end of
`raw.time_hops`. Each answer begins with the nanosecond at which it was sent.

A program: it reads the AMQP URL, which may hold a password, the names of the two queues and how
many bytes of memory to read before each answer from standard input, a line each, and ends when its
input does.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pika

from shared.broker.rabbitmq.address import parse_address

STAMP_BYTES = 8


def main() -> None:
    """Runs until standard input ends."""
    url, source, target, num_bytes = (sys.stdin.readline().strip() for _ in range(4))
    weights = np.ones(int(num_bytes), np.uint8)
    properties = pika.BasicProperties(delivery_mode=1)

    def answer(channel: Any, method: Any, headers: Any, body: bytes) -> None:
        read_through(weights)
        channel.basic_publish("", target, stamp() + body[STAMP_BYTES:], properties)

    with pika.BlockingConnection(parse_address(url).parameters("echo", heartbeat_s=60)) as link:
        channel = link.channel()
        threading.Thread(
            target=lambda: (
                sys.stdin.read(),
                link.add_callback_threadsafe(channel.stop_consuming),
            ),
            daemon=True,
        ).start()
        channel.basic_consume(source, answer, auto_ack=True)
        channel.start_consuming()


def read_through(weights: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """What computing a layer group does to the caches."""
    weights.max(initial=0)


def stamp() -> bytes:
    return time.time_ns().to_bytes(STAMP_BYTES, "big")


if __name__ == "__main__":
    main()
