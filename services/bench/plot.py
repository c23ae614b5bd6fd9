"""Draws throughput as a PNG, with matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from services.bench.context import ContextFigures
from services.bench.options import ClusterFigures
from shared.errors import ConfigError


def check_plot(path: Path) -> None:
    """Raise `ConfigError` now rather than after the measurement."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {path} needs matplotlib",
            remedy="pip install 'cellpipe[plot]', or leave it out: a plot in text is printed",
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}")


def draw(figures: ClusterFigures, path: Path) -> None:
    """Against concurrency on the left, against the number of groups on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    by_streams, by_groups = figure.subplots(1, 2)
    for layout in figures.layouts:
        streams = [point.concurrency for point in layout.points]
        rates = [point.load.tokens_per_s for point in layout.points]
        name = f"{layout.num_groups} group(s)"
        (line,) = by_streams.plot(streams, rates, marker="o", label=name)
        if all(point.peer for point in layout.points):
            peer = [p.peer.load.tokens_per_s for p in layout.points if p.peer]
            by_streams.plot(
                streams, peer, marker="x", linestyle="--", color=line.get_color(),
                label=f"llama.cpp, {name}",
            )  # fmt: skip
    for same in zip(*(layout.points for layout in figures.layouts), strict=True):
        by_groups.plot(
            [point.num_groups for point in same],
            [point.load.tokens_per_s for point in same],
            marker="o",
            label=f"{same[0].concurrency} streams",
        )
    by_streams.set_xlabel("streams at once")
    by_groups.set_xlabel("layer groups")
    by_groups.set_xticks([layout.num_groups for layout in figures.layouts])
    for axes in (by_streams, by_groups):
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    options = figures.options
    figure.suptitle(f"{figures.model_id}, {options.queue_type} queues, {options.wire} wire")
    figure.savefig(path, format="png")


def draw_contexts(figures: Sequence[ContextFigures], model_id: str, path: Path) -> None:
    """Milliseconds a token against the context, of the pipeline and of the kernel alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    contexts = [f.context for f in figures]
    axes.plot(contexts, [f.pipeline_ms for f in figures], marker="o", label="pipeline")
    axes.plot(contexts, [f.kernel_ms for f in figures], marker="x", label="kernel alone")
    axes.set_xlabel("positions of context")
    axes.set_ylabel("milliseconds a token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.suptitle(model_id)
    figure.savefig(path, format="png")
