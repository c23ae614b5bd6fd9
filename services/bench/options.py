"""What `cellpipe bench cluster` measures, and what it found, as values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.bench.hops import Hop
from services.bench.latency import LoadFigures, RawFigures
from shared.topology import QueueType, Wire


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the user asked for. Tokens are those of each answer, prompt tokens those before it."""

    model: str
    num_groups: tuple[int, ...] = (2,)
    workers_per_group: int = 1
    threads: int = 1
    concurrency: tuple[int, ...] = (1, 4, 16, 32)
    num_tokens: int = 64
    num_prompt: int = 16
    rounds: int = 3
    memory: str = "256MiB"
    queue_type: QueueType = QueueType.CLASSIC
    wire: Wire = Wire.F32
    seed: int = 0
    patience_s: float = 120.0
    log_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class PeerFigures:
    """The peer under the same load. `ratio` is ours to its throughput, median of the rounds'."""

    load: LoadFigures
    ratio: float


@dataclass(frozen=True, slots=True)
class PointFigures:
    """One number of groups at one concurrency.

    `gap_ms` from token to token, of which the hops explain `way_ms`; both are means of all rounds.
    """

    num_groups: int
    concurrency: int
    load: LoadFigures
    hops: list[Hop]
    way_ms: float
    gap_ms: float
    peer: PeerFigures | None = None


@dataclass(frozen=True, slots=True)
class LayoutFigures:
    """One number of groups; the yardsticks were taken between its loads: a message to a queue and
    back to the same process; one to another process; the same where both read a group's weights
    before each; a question to Redis.

    `peer_bench_tokens_per_s` is what the peer's own benchmark said of one stream, before the rest.
    """

    num_groups: int
    pika_ping_pong: RawFigures
    pika_hop: RawFigures
    pika_cold_hop: RawFigures
    redis_round_trip: RawFigures
    points: list[PointFigures]
    peer_bench_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    model_id: str
    options: ClusterOptions
    layouts: list[LayoutFigures]
