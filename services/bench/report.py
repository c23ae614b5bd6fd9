"""Figures of `cellpipe bench cluster` as JSON and as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from services.bench.latency import RawFigures
from services.bench.options import ClusterFigures, LayoutFigures, PointFigures
from shared.store.presence_types import STAGES

BAR_WIDTH = 40
NOT_ON_THE_WAY = ("confirm", "settle")


def to_dict(figures: ClusterFigures) -> dict[str, Any]:
    shown = asdict(figures)
    log_folder = figures.options.log_folder
    shown["options"]["log_folder"] = str(log_folder) if log_folder else None
    for layout, shown_layout in zip(figures.layouts, shown["layouts"], strict=True):
        for point, shown_point in zip(layout.points, shown_layout["points"], strict=True):
            shown_point["beyond_raw_ms"] = beyond_ms(layout, point)
    return {"bench": "cluster", **shown}


def to_lines(figures: ClusterFigures) -> list[str]:
    options = figures.options
    lines = [
        f"{figures.model_id}: {options.num_tokens} tokens after {options.num_prompt} of prompt, "
        f"{options.workers_per_group} x {options.threads} thread(s) a group, "
        f"{options.queue_type} queues, {options.wire} wire, medians of {options.rounds} rounds"
    ]
    for layout in figures.layouts:
        lines += ["", *_load_lines(layout), "", *_hop_lines(layout)]
    return [*lines, "", *plot_lines(figures)]


def _load_lines(layout: LayoutFigures) -> list[str]:
    head = f"{'streams':>9} {'tok/s':>8} {'first token ms':>17} {'next token ms':>17}"
    has_peer = any(point.peer for point in layout.points)
    if has_peer:
        head += f" {'llama.cpp':>10} {'ratio':>6}"
    lines = [f"{_groups(layout.num_groups)}: throughput and latency, p50 / p95", head]
    for point in layout.points:
        load = point.load
        line = (
            f"{point.concurrency:>9} {load.tokens_per_s:>8.1f} "
            f"{load.first_p50_ms:>8.1f} /{load.first_p95_ms:>7.1f} "
            f"{load.next_p50_ms:>8.1f} /{load.next_p95_ms:>7.1f}"
        )
        if point.peer:
            line += f" {point.peer.load.tokens_per_s:>10.1f} {point.peer.ratio:>6.2f}"
        lines.append(line)
    if layout.peer_bench_tokens_per_s is not None:
        lines.append(f"llama-bench, one stream: {layout.peer_bench_tokens_per_s:.1f} tok/s")
    return lines


def _hop_lines(layout: LayoutFigures) -> list[str]:
    """Means over the groups: what a step waits for at one hop."""
    points = layout.points
    lines = [
        f"{_groups(layout.num_groups)}: what a step waits for at one hop, mean ms",
        f"{'streams':>16} " + " ".join(f"{point.concurrency:>8}" for point in points),
    ]
    for name in STAGES:
        cells = [_cell([hop.stage_ms[name] for hop in point.hops]) for point in points]
        note = "  beside" if name in NOT_ON_THE_WAY else ""
        if name == "redis" and layout.num_groups > 1:
            note = "  beside, but for the last group"
        lines.append(f"{name:>16} " + " ".join(cells) + note)
    lines += [
        f"{'all hops':>16} " + " ".join(f"{point.way_ms:>8.2f}" for point in points),
        f"{'token to token':>16} " + " ".join(f"{point.gap_ms:>8.2f}" for point in points),
        f"{'steps a batch':>16} "
        + " ".join(_cell([hop.batch for hop in point.hops]) for point in points),
        f"{'beyond raw, hop':>16} "
        + " ".join(f"{beyond_ms(layout, point):>8.2f}" for point in points)
        + "  less the kernel and a raw message after reading weights",
        f"raw pika, to a queue and back: {_raw(layout.pika_ping_pong)}; to another process: "
        f"{_raw(layout.pika_hop)}, after reading a group's weights: {_raw(layout.pika_cold_hop)}",
        f"raw Redis round trip: {_raw(layout.redis_round_trip)}",
    ]
    return lines


def beyond_ms(layout: LayoutFigures, point: PointFigures) -> float:
    """What a hop costs beside the kernel and a message of pika's to another process, where both
    do what a kernel does to the caches."""
    compute_ms = sum(hop.stage_ms["compute"] for hop in point.hops)
    return (point.gap_ms - compute_ms) / layout.num_groups - layout.pika_cold_hop.p50_ms


def _raw(figures: RawFigures) -> str:
    return f"{figures.p50_ms:.3f} ms p50, {figures.p95_ms:.3f} p95"


def plot_lines(figures: ClusterFigures) -> list[str]:
    """Throughput against concurrency and, with several, against the number of groups."""
    best = max(point.load.tokens_per_s for lay in figures.layouts for point in lay.points)
    lines = ["tok/s by streams"]
    for layout in figures.layouts:
        lines += [
            f"{_groups(layout.num_groups):>9} {p.concurrency:>4} {_bar(p, best)}"
            for p in layout.points
        ]
    if len(figures.layouts) > 1:
        lines += ["", "tok/s by groups"]
        for same in zip(*(layout.points for layout in figures.layouts), strict=True):
            lines += [
                f"{p.concurrency:>4} streams {_groups(p.num_groups):>9} {_bar(p, best)}"
                for p in same
            ]
    return lines


def _bar(point: PointFigures, best: float) -> str:
    rate = point.load.tokens_per_s
    return f"{'█' * max(1, round(BAR_WIDTH * rate / best))} {rate:.1f}"


def _cell(values: Sequence[float]) -> str:
    return f"{fmean(values):>8.2f}" if values else f"{'-':>8}"


def _groups(number: int) -> str:
    return "1 group" if number == 1 else f"{number} groups"
