"""Measures a cluster that it brings up itself: load, yardsticks and a peer in turns, in medians.

One number of layer groups after the other, since each needs workers of its own; within one, each
round runs every concurrency, so that a machine whose speed changes does so for all of them.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.bench.hops import HopSums, hops_between, hops_of, sums_by_group
from services.bench.latency import LoadFigures, Stream, figures_of, median_of, raw_figures
from services.bench.options import (
    ClusterFigures,
    ClusterOptions,
    LayoutFigures,
    PeerFigures,
    PointFigures,
)
from shared.broker.rabbitmq.raw import time_ping_pong
from shared.errors import ConfigError, RequestError, TransientError
from shared.local_cluster.load import Load, Question
from shared.local_cluster.processes import Crew
from shared.local_cluster.servers import PrivateServers, Servers
from shared.local_cluster.start import connections, wait_until_serving
from shared.messages import FinishReason, SamplingParams
from shared.model.config import ModelConfig
from shared.producer import Producer
from shared.store.ledger import Ledger
from shared.store.presence import Presence
from shared.store.raw import time_round_trips
from shared.store.shards import ShardStore
from shared.topology import Layout
from shared.wire import row_bytes

NUM_PING_PONGS = 200
NUM_ROUND_TRIPS = 500
FRAME_BYTES = 300  # of a decode step beside its hidden state
LOOK_S = 0.05
HEARTBEATS_S = 15.0  # in which every worker has told of itself anew

Prompts = Sequence[tuple[int, ...]]


class Peer(Protocol):
    """Something that answers the same load.

    `one_stream_tokens_per_s` is what its own benchmark says of one stream, if there is one.
    """

    one_stream_tokens_per_s: float | None

    def answer(self, prompts: Prompts, num_tokens: int) -> list[Stream]:
        """All prompts at once."""


OpenPeer = Callable[[int, Path], AbstractContextManager[Peer]]
"""For so many groups, with its logs in a folder."""


@dataclass(slots=True)
class _Point:
    """What the rounds of one concurrency gave so far."""

    ours: list[LoadFigures] = field(default_factory=list)
    theirs: list[LoadFigures] = field(default_factory=list)
    sums: list[HopSums] = field(default_factory=list)


def measure_cluster(
    options: ClusterOptions, *, open_peer: OpenPeer | None, say: Callable[[str], None]
) -> ClusterFigures:
    """Run it all; `say` hears of each step.

    Raises `ConfigError` when it cannot start, `RequestError` when an answer is not whole.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cellpipe-bench-")))
        logs = options.log_folder or folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        say("starting servers")
        servers = PrivateServers(folder)
        stack.callback(servers.close)
        layouts = []
        model_id = ""
        for num_groups in options.num_groups:
            with ExitStack() as block:
                rig = block.enter_context(_Rig(options, num_groups, servers, logs, say))
                peer = block.enter_context(
                    open_peer(num_groups, logs) if open_peer else nullcontext()
                )
                layouts.append(rig.measure(peer))
                model_id = rig.layout.model_id
        return ClusterFigures(model_id, options, layouts)


class _Rig:
    """Scheduler and workers of one number of groups, and what is measured of them."""

    layout: Layout

    def __init__(
        self,
        options: ClusterOptions,
        num_groups: int,
        servers: Servers,
        logs: Path,
        say: Callable[[str], None],
    ) -> None:
        self._options = options
        self._num_groups = num_groups
        self._servers = servers
        self._logs = logs
        self._say = say
        self._stack = ExitStack()
        self._rng = random.Random(f"bench/{options.seed}/{num_groups}")

    def __enter__(self) -> _Rig:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, peer: Peer | None) -> LayoutFigures:
        """One round that does not count, then all that do."""
        options = self._options
        points = {concurrency: _Point() for concurrency in options.concurrency}
        pings: list[float] = []
        trips: list[float] = []
        self._say("warming up")
        self._round(1, peer)
        for number in range(options.rounds):
            pings += time_ping_pong(
                self._servers.settings["CELLPIPE_AMQP_URL"],
                options.queue_type,
                body_bytes=self._body_bytes,
                num_times=NUM_PING_PONGS,
            )
            trips += time_round_trips(
                self._servers.settings["CELLPIPE_REDIS_URL"], num_times=NUM_ROUND_TRIPS
            )
            for concurrency, point in points.items():
                ours, theirs, sums = self._round(concurrency, peer)
                point.ours.append(ours)
                point.sums = (
                    [a.plus(b) for a, b in zip(point.sums, sums, strict=True)]
                    if point.sums
                    else sums
                )
                told = f"{ours.tokens_per_s:.1f} tok/s"
                if theirs is not None:
                    point.theirs.append(theirs)
                    told += f", peer {theirs.tokens_per_s:.1f}"
                self._say(
                    f"round {number + 1}/{options.rounds}, {self._num_groups} groups, "
                    f"{concurrency} streams: {told}"
                )
        return LayoutFigures(
            self._num_groups,
            raw_figures(pings),
            raw_figures(trips),
            [self._point(concurrency, point) for concurrency, point in points.items()],
            peer.one_stream_tokens_per_s if peer else None,
        )

    def _start(self) -> None:
        options, settings = self._options, self._servers.settings
        enter = self._stack.enter_context
        crew = enter(Crew(settings, self._logs))
        crew.run(
            "load", options.model, "--groups", str(self._num_groups),
            "--queue-type", options.queue_type, "--wire", options.wire,
        )  # fmt: skip
        stores, broker = enter(connections(settings))
        shards = ShardStore(stores.weights)
        self.layout = shards.active_layout("")
        self._config = ModelConfig.from_dict(shards.get_manifest(self.layout.model_id).config)
        num_positions = options.num_prompt + options.num_tokens
        if num_positions > self._config.max_position_embeddings:
            raise ConfigError(
                f"--prompt-tokens and --tokens make {num_positions} positions, and the model has "
                f"{self._config.max_position_embeddings}"
            )
        self._body_bytes = row_bytes(options.wire, self._config.hidden_size) + FRAME_BYTES
        self._presence = Presence(stores.meta)
        self._producer = Producer(broker, Ledger(stores.meta))
        self._say(
            f"starting a scheduler and {self._num_groups} x {options.workers_per_group} workers"
        )
        name = f"{self._num_groups}-groups"
        crew.add("scheduler", f"{name}-scheduler", "scheduler")
        for group in range(self._num_groups):
            for number in range(options.workers_per_group):
                crew.add(
                    "worker", f"{name}-worker-{group}.{number}",
                    "worker", "--group", str(group), "--memory", options.memory,
                    "--threads", str(options.threads), group=group,
                )  # fmt: skip
        wait_until_serving(crew, self.layout, self._presence)
        self._crew = crew

    def _round(
        self, concurrency: int, peer: Peer | None
    ) -> tuple[LoadFigures, LoadFigures | None, list[HopSums]]:
        """The same prompts for both, new ones every time: nobody finds them in a cache."""
        prompts = [
            tuple(
                self._rng.randrange(self._config.vocab_size)
                for _ in range(self._options.num_prompt)
            )
            for _ in range(concurrency)
        ]
        before = self._sums()
        ours = figures_of(self._answer(prompts))
        sums = hops_between(before, self._sums())
        theirs = figures_of(peer.answer(prompts, self._options.num_tokens)) if peer else None
        return ours, theirs, sums

    def _answer(self, prompts: Prompts) -> list[Stream]:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=self._options.num_tokens, ignore_eos=True
        )
        load = Load(
            self._producer,
            [Question(prompt, sampling) for prompt in prompts],
            num_requests=len(prompts),
            concurrency=len(prompts),
            patience_s=self._options.patience_s,
            model_id=self.layout.model_id,
        )
        load.start()
        try:
            while load.is_running():
                if dead := [m.name for m in self._crew.members if not m.is_alive]:
                    raise RequestError(f"{dead[0]} died while it was measured")
                time.sleep(LOOK_S)
        finally:
            load.stop()
        for seen in load.sightings:
            is_whole = len(seen.tokens) == self._options.num_tokens
            if seen.finish_reason is not FinishReason.LENGTH or not is_whole:
                raise RequestError(
                    f"an answer ended after {len(seen.tokens)} of {self._options.num_tokens} "
                    f"tokens: {seen.error or seen.finish_reason or 'nothing more was heard'}"
                )
        return [
            Stream(seen.submitted_s, tuple(at_s for at_s, _, _ in seen.tokens), len(seen.tokens))
            for seen in load.sightings
        ]

    def _sums(self) -> list[HopSums]:
        """What all workers have told since now: they do with each heartbeat."""
        now_ms = time.time_ns() // 1_000_000
        deadline_s = time.monotonic() + HEARTBEATS_S
        num_workers = self._num_groups * self._options.workers_per_group
        while time.monotonic() < deadline_s:
            workers = self._presence.workers(self.layout)
            if sum(worker.told_unix_ms > now_ms for worker in workers) == num_workers:
                return sums_by_group(workers, self._num_groups)
            time.sleep(LOOK_S)
        raise TransientError(f"not all workers gave a sign of life within {HEARTBEATS_S:g} s")

    def _point(self, concurrency: int, point: _Point) -> PointFigures:
        load = median_of(point.ours)
        hops = hops_of(point.sums)
        gap_ms = statistics.fmean(figures.gap_ms for figures in point.ours)
        peer = None
        if point.theirs:
            ratios = [
                ours.tokens_per_s / theirs.tokens_per_s
                for ours, theirs in zip(point.ours, point.theirs, strict=True)
            ]
            peer = PeerFigures(median_of(point.theirs), statistics.median(ratios))
        return PointFigures(
            self._num_groups,
            concurrency,
            load,
            hops,
            sum(hop.on_the_way_ms for hop in hops),
            gap_ms,
            peer,
        )
