"""What Redis takes with nothing of ours around it: the yardstick of a benchmark."""

from __future__ import annotations

import time

import redis

from shared.errors import StoreUnavailable


def time_round_trips(url: str, *, num_times: int) -> list[float]:
    """Seconds of one PING each. Raises `StoreUnavailable`."""
    times = []
    try:
        with redis.Redis.from_url(url, protocol=2) as client:
            for _ in range(num_times):
                began_s = time.perf_counter()
                client.ping()
                times.append(time.perf_counter() - began_s)
    except redis.RedisError as error:
        raise StoreUnavailable(f"Redis went away while it was measured: {error}") from error
    return times
