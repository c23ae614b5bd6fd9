"""Draws a run over time, as a PNG or inside an HTML page, with matplotlib if it is installed."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.simulator.report import to_lines
from services.simulator.simulation import Outcome
from shared.errors import ConfigError


def check_plot(path: Path, option: str) -> None:
    """Raise `ConfigError` now rather than after the run."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"{option} {path} needs matplotlib",
            remedy="pip install 'cellpipe[plot]', or leave it out: the figures are printed",
        )
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")


def draw(outcome: Outcome, path: Path) -> None:
    """Tokens a second, latencies, queues, and what is dead, over the simulated time."""
    _write(path, _png(outcome))


def write_html(outcome: Outcome, path: Path) -> None:
    """One page without any other file: the figures, and the plots."""
    image = base64.b64encode(_png(outcome)).decode()
    title = html.escape(outcome.world.name or "a cluster")
    text = html.escape("\n".join(to_lines(outcome)))
    page = (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px sans-serif;margin:2em auto;max-width:75em}"
        "img{max-width:100%}pre{overflow:auto}</style>"
        f'<h1>{title}</h1><img alt="the run over time" src="data:image/png;base64,{image}">'
        f"<pre>{text}</pre></html>\n"
    )
    _write(path, page.encode())


def draw_growth(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds and memory against the number of nodes, beside a line of slope 1."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    seconds, memory = figure.subplots(1, 2)
    nodes = [row["nodes"] for row in rows]
    took = [row["cpu_s"] for row in rows]
    seconds.loglog(nodes, took, marker="o", label="measured")
    linear = [took[-1] * n / nodes[-1] for n in nodes]
    seconds.loglog(nodes, linear, linestyle="--", label="linear")
    seconds.set_ylabel("seconds of CPU")
    seconds.legend()
    memory.loglog(nodes, [row["peak_mb"] for row in rows], marker="o")
    memory.set_ylabel("MB at most")
    for axes in (seconds, memory):
        axes.set_xlabel("nodes, requests in proportion")
        axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    _write(path, image.getvalue())


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def _png(outcome: Outcome) -> bytes:
    from matplotlib.figure import Figure

    rows = outcome.figures.over_time(outcome.num_workers)
    minutes = [row["at_s"] / 60 for row in rows]
    figure = Figure(figsize=(12, 8), layout="constrained")
    (tokens, first), (gaps, queues) = figure.subplots(2, 2)
    tokens.plot(minutes, [row["tokens_per_s"] for row in rows])
    tokens.set_ylabel("tokens per second")
    for axes, key, label in (
        (first, "first_token_s", "seconds to the first token"),
        (gaps, "token_s", "seconds from token to token"),
    ):
        for name in ("p50", "p90", "p99"):
            axes.plot(minutes, [row[key][name] for row in rows], label=name)
        axes.set_ylabel(label)
        axes.legend()
    for key, name in (
        ("num_running", "requests running"),
        ("num_waiting", "waiting"),
        ("num_still", "standing still"),
        ("num_dead_nodes", "dead nodes"),
    ):
        queues.plot(minutes, [row[key] for row in rows], label=name)
    queues.legend()
    for axes in (tokens, first, gaps, queues):
        axes.set_xlabel("minutes")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.suptitle(outcome.world.name)
    image = io.BytesIO()
    # Without the version of matplotlib: the same run is to give the same bytes.
    figure.savefig(image, format="png", metadata={"Software": None})
    return image.getvalue()
