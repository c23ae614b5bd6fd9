"""Sends every message of one queue to another, with pika alone: the far end of `raw.time_hops`.

A program: it reads the AMQP URL, which may hold a password, and the names of the two queues from
standard input, a line each, and ends when its input does.
"""

from __future__ import annotations

import sys
import threading

import pika

from shared.broker.rabbitmq.address import parse_address


def main() -> None:
    """Runs until standard input ends."""
    url, source, target = (sys.stdin.readline().strip() for _ in range(3))
    properties = pika.BasicProperties(delivery_mode=1)
    with pika.BlockingConnection(parse_address(url).parameters("echo", heartbeat_s=60)) as link:
        channel = link.channel()
        threading.Thread(
            target=lambda: (
                sys.stdin.read(),
                link.add_callback_threadsafe(channel.stop_consuming),
            ),
            daemon=True,
        ).start()
        channel.basic_consume(
            source, lambda c, _, __, body: c.basic_publish("", target, body, properties), True
        )
        channel.start_consuming()


if __name__ == "__main__":
    main()
