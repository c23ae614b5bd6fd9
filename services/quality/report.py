"""Turns an evaluation into rows, a JSON object, and an HTML page that needs nothing beside it.

The terminal and the page show the same rows. Knows no model.
"""

from __future__ import annotations

import io
import os
from dataclasses import asdict, dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from services.quality.evaluate import Evaluation
from services.quality.footprint import Footprint
from shared.errors import ConfigError

PLOT_EXTRA = "pip install 'cellpipe[plot]'"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and what it means."""

    name: str
    value: str
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Subject:
    """What was evaluated, for the head of a report. `arithmetic` says what computed."""

    model: str
    arithmetic: str
    text: str
    reference: str = ""
    reference_arithmetic: str = ""


def sections(evaluation: Evaluation, footprint: Footprint | None) -> tuple[Section, ...]:
    """The rows of a report, under their headings; those that there are."""
    found = [_quality(evaluation)]
    if evaluation.layers:
        found.append(_layers(evaluation))
    if footprint is not None:
        found.append(_memory(footprint))
    return tuple(found)


def report_dict(
    subject: Subject, evaluation: Evaluation, footprint: Footprint | None
) -> dict[str, Any]:
    """The same as one JSON object; figures of a reference are null without one."""
    e, p, d = evaluation, evaluation.perplexity, evaluation.divergence
    reference = e.reference_perplexity
    memory = None
    if footprint is not None:
        memory = asdict(footprint) | {
            "bytes_per_parameter": footprint.bytes_per_parameter,
            "bits_per_weight": footprint.bits_per_weight,
        }
    return {
        "model": subject.model,
        "arithmetic": subject.arithmetic,
        "text": subject.text,
        "window": e.window,
        "num_windows": e.num_windows,
        "num_tokens": e.num_tokens,
        "num_scored": p.num_scored,
        "perplexity": p.value,
        "perplexity_error": p.error,
        "mean_loss": p.mean_loss,
        "reference": subject.reference or None,
        "reference_arithmetic": subject.reference_arithmetic or None,
        "reference_perplexity": reference.value if reference else None,
        "divergence": asdict(d) if d else None,
        "layers": [asdict(layer) for layer in e.layers],
        "memory": memory,
    }


def check_html(path: Path) -> str:
    """Raise `ConfigError` for a page that could not be written, before anything is computed.

    Returns what is to be said now: that there will be no plot, or "".
    """
    if not path.parent.is_dir():
        raise ConfigError(f"--html {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"--html {path} is a folder", remedy="give the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--html {path} cannot be written: no permission")
    if find_spec("matplotlib") is None:
        return f"--html {path.name} will have no plot: matplotlib is not installed ({PLOT_EXTRA})"
    return ""


def write_html(
    path: Path, subject: Subject, evaluation: Evaluation, footprint: Footprint | None
) -> None:
    """A page with the tables, and the plot if matplotlib is here. Raises `ConfigError` when it
    cannot be written."""
    template = files("services.quality").joinpath("report.html").read_text(encoding="utf-8")
    has_matplotlib = find_spec("matplotlib") is not None
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    page = environment.from_string(template).render(
        subject=subject,
        sections=sections(evaluation, footprint),
        plot=_plot(evaluation) if has_matplotlib and evaluation.layers else "",
        plot_missing="" if has_matplotlib else PLOT_EXTRA,
    )
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from error


def _quality(e: Evaluation) -> Section:
    p, d, reference = e.perplexity, e.divergence, e.reference_perplexity
    rows = [
        Row(
            "perplexity",
            f"{p.value:.4f} ± {p.error:.4f}",
            f"{p.num_scored} tokens in {e.num_windows} windows of {e.window}; llama.cpp's method",
        ),
        Row("mean loss", f"{p.mean_loss:.5f}", "nats a token"),
    ]
    if reference is not None and d is not None:
        rows += [
            Row("perplexity of the reference", f"{reference.value:.4f}"),
            Row("perplexity ratio", f"{d.perplexity_ratio:.5f}", "1 is no loss"),
            Row("mean KL", f"{d.mean_kl:.6f} ± {d.kl_error:.6f}", "nats, from the reference"),
            Row("median KL", f"{d.median_kl:.6f}"),
            Row("99th percentile of KL", f"{d.p99_kl:.6f}"),
            Row("largest KL", f"{d.max_kl:.6f}"),
            Row("same likeliest token", f"{d.top1_agreement:.2%}", "of the scored positions"),
        ]
    return Section("Quality", tuple(rows))


def _layers(e: Evaluation) -> Section:
    return Section(
        "Error after each layer",
        tuple(
            Row(f"layer {layer.layer}", f"{layer.relative_rms:.5f}", "" if layer.layer else
                "RMS of the difference of hidden states over the reference's RMS")
            for layer in e.layers
        ),
    )  # fmt: skip


def _memory(f: Footprint) -> Section:
    rows = [
        Row("parameters", f"{f.num_parameters:,}"),
        Row("bytes of weights", f"{f.num_bytes:,}", f"as the kernel keeps them, in {f.num_chunks} "
            "chunks, each of which fits a local store of 256 KiB twice"),
        Row("bytes per parameter", f"{f.bytes_per_parameter:.4f}", f"{f.bits_per_weight:.3f} bits"),
    ]  # fmt: skip
    rows += [
        Row(f"{k.kind} weights", f"{k.num_weights:,}", f"{k.bits_per_weight:.3f} bits each")
        for k in f.kinds
    ]  # fmt: skip
    rows.append(
        Row(
            "layers in 256 MiB",
            f"{f.layers_in_256_mib} of {f.num_layers}",
            f"the largest is {f.largest_layer_bytes / 1e6:.1f} MB; KV rows come on top",
        )
    )
    return Section("Memory", tuple(rows))


def _plot(evaluation: Evaluation) -> str:
    """The error after each layer, as SVG for the middle of a page."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(
        [layer.layer for layer in evaluation.layers],
        [layer.relative_rms for layer in evaluation.layers],
        marker="o",
    )
    axes.set_xlabel("layer")
    axes.set_ylabel("relative RMS error")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    buffer = io.StringIO()
    # Equal figures are to give equal pages: no date, and ids from a fixed word.
    with mpl.rc_context({"svg.hashsalt": "cellpipe"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
