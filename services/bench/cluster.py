"""Measures a cluster that it brings up itself: load, yardsticks and a peer in turns, in medians.

One number of layer groups after the other, since each needs workers of its own; within one, each
round runs every concurrency, so that a machine whose speed changes does so for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.bench.hops import HopSums, hops_between, hops_of
from services.bench.latency import LoadFigures, Stream, figures_of, median_of, raw_figures
from services.bench.options import (
    ClusterFigures,
    ClusterOptions,
    LayoutFigures,
    PeerFigures,
    PointFigures,
)
from services.bench.rig import Prompts, Rig, private_servers
from shared.broker.rabbitmq.raw import time_hops, time_ping_pong
from shared.local_cluster.servers import Servers
from shared.store.raw import time_round_trips
from shared.wire import row_bytes

NUM_PING_PONGS = 200
NUM_COLD_HOPS = 60
NUM_ROUND_TRIPS = 500
FRAME_BYTES = 300  # of a decode step beside its hidden state


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
    with private_servers(options, say) as (servers, logs):
        layouts = []
        model_id = ""
        for num_groups in options.num_groups:
            with ExitStack() as block:
                num_positions = options.num_prompt + options.num_tokens
                rig = block.enter_context(
                    Rig(options, num_groups, servers, logs, say, num_positions=num_positions)
                )
                peer = block.enter_context(
                    open_peer(num_groups, logs) if open_peer else nullcontext()
                )
                layouts.append(_Rounds(rig, options, servers).measure(peer))
                model_id = rig.layout.model_id
        return ClusterFigures(model_id, options, layouts)


class _Rounds:
    """What is measured of one rig."""

    def __init__(self, rig: Rig, options: ClusterOptions, servers: Servers) -> None:
        self._rig = rig
        self._options = options
        self._servers = servers
        self._body_bytes = row_bytes(options.wire, rig.config.hidden_size) + FRAME_BYTES

    def measure(self, peer: Peer | None) -> LayoutFigures:
        """One round that does not count, then all that do."""
        options = self._options
        points = {concurrency: _Point() for concurrency in options.concurrency}
        pings: list[float] = []
        hops: list[float] = []
        cold_hops: list[float] = []
        trips: list[float] = []
        self._rig.say("warming up")
        self._round(1, peer)
        for number in range(options.rounds):
            url = self._servers.settings["CELLPIPE_AMQP_URL"]
            kind, size = options.queue_type, self._body_bytes
            pings += time_ping_pong(url, kind, body_bytes=size, num_times=NUM_PING_PONGS)
            hops += time_hops(url, kind, body_bytes=size, num_times=NUM_PING_PONGS)
            cold_hops += time_hops(
                url,
                kind,
                body_bytes=size,
                num_times=NUM_COLD_HOPS,
                read_bytes=self._rig.mean_group_bytes,
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
                self._rig.say(
                    f"round {number + 1}/{options.rounds}, {self._rig.num_groups} groups, "
                    f"{concurrency} streams: {told}"
                )
        return LayoutFigures(
            self._rig.num_groups,
            raw_figures(pings),
            raw_figures(hops),
            raw_figures(cold_hops),
            raw_figures(trips),
            [self._point(concurrency, point) for concurrency, point in points.items()],
            peer.one_stream_tokens_per_s if peer else None,
        )

    def _round(
        self, concurrency: int, peer: Peer | None
    ) -> tuple[LoadFigures, LoadFigures | None, list[HopSums]]:
        """The same prompts for both, new ones every time: nobody finds them in a cache."""
        prompts = self._rig.prompts(concurrency, self._options.num_prompt)
        before = self._rig.sums()
        ours = figures_of(self._rig.answer(prompts, self._options.num_tokens))
        sums = hops_between(before, self._rig.sums())
        theirs = figures_of(peer.answer(prompts, self._options.num_tokens)) if peer else None
        return ours, theirs, sums

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
            self._rig.num_groups,
            concurrency,
            load,
            hops,
            sum(hop.on_the_way_ms for hop in hops),
            gap_ms,
            peer,
        )
