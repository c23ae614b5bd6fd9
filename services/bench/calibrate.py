"""Measures this machine for a planner: kernel, memory, a small cluster, broker and Redis.

Knows no plan; gives figures.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.bench.cluster import measure_cluster
from services.bench.kernel import SHARE_BATCH, KernelFigures, measure_kernels
from services.bench.options import ClusterFigures, ClusterOptions
from services.bench.rig import private_servers
from shared.broker.rabbitmq.raw import time_flood
from shared.errors import ConfigError
from shared.kernel.names import REFERENCE
from shared.model.backend import available_kernels
from shared.store.raw import time_writes

SMALL_BYTES, LARGE_BYTES = 2_600, 256 * 1024  # a step of SmolLM2-135M; a slice of a prompt
NUM_SMALL, NUM_LARGE = 4_000, 400
STREAM_BYTES = 256 << 20
TURNS = 3


@dataclass(frozen=True, slots=True)
class ServerRates:
    """What one client moves through a broker and a Redis, medians of a few turns."""

    broker_messages_per_s: float
    broker_bytes_per_s: float
    redis_operations_per_s: float
    redis_bytes_per_s: float


def measure_machine(say: Callable[[str], None]) -> KernelFigures:
    """The kernel that a worker would take, on one thread."""
    here = [name for name in available_kernels() if name != REFERENCE]
    if not here:
        raise ConfigError("the C kernel was not built", remedy="python -m shared.kernel.build")
    say(f"measuring the kernel ({here[0]})")
    (figures,) = measure_kernels(
        here[:1], (1,), repeats=5, streamed_bytes=STREAM_BYTES, tell=lambda _: None
    )
    return figures


def peak_and_read(figures: KernelFigures) -> tuple[float, float]:
    """Multiply-adds a second in registers, and bytes a second of plain reading."""
    assert str(SHARE_BATCH) in figures.multiply_adds_per_s, "measured with the others"
    return figures.peak_multiply_adds_per_s, figures.read_bytes_per_s["int4"]


def measure_servers(options: ClusterOptions, say: Callable[[str], None]) -> ServerRates:
    """Private servers under one client. Raises `ConfigError` when they cannot be started."""
    with private_servers(options, say) as (servers, _):
        amqp = servers.settings["CELLPIPE_AMQP_URL"]
        redis = servers.settings["CELLPIPE_REDIS_URL"]
        say("measuring broker and Redis")

        def flood(size: int, number: int) -> float:
            times = [
                time_flood(amqp, options.queue_type, body_bytes=size, num_times=number)
                for _ in range(TURNS)
            ]
            return number / statistics.median(times)

        def write(size: int, number: int) -> float:
            times = [time_writes(redis, value_bytes=size, num_times=number) for _ in range(TURNS)]
            return number / statistics.median(times)

        return ServerRates(
            flood(SMALL_BYTES, NUM_SMALL),
            flood(LARGE_BYTES, NUM_LARGE) * LARGE_BYTES,
            write(SMALL_BYTES, NUM_SMALL),
            write(LARGE_BYTES, NUM_LARGE) * LARGE_BYTES,
        )


def measure_loads(options: ClusterOptions, say: Callable[[str], None]) -> ClusterFigures:
    """A cluster under each load."""
    return measure_cluster(options, open_peer=None, say=say)


def usable_memory_bytes() -> int:
    """What programs can have of this machine's memory now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
