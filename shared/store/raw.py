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


def time_writes(url: str, *, value_bytes: int, num_times: int, each: int = 16) -> float:
    """Seconds for so many SETs of values of that size, `each` of them in a pipeline, as a worker
    writes the rows of a batch. They are deleted. Raises `StoreUnavailable`."""
    value = bytes(value_bytes)
    keys = [f"cellpipe:raw:{number}" for number in range(each)]
    try:
        with redis.Redis.from_url(url, protocol=2) as client:
            began_s = time.perf_counter()
            for _ in range(-(-num_times // each)):
                pipeline = client.pipeline(transaction=False)
                for key in keys:
                    pipeline.set(key, value)
                pipeline.execute()
            spent_s = time.perf_counter() - began_s
            client.delete(*keys)
    except redis.RedisError as error:
        raise StoreUnavailable(f"Redis went away while it was measured: {error}") from error
    return spent_s
