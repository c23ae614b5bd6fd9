"""A plan as one HTML file with its plots in it, drawn with matplotlib if it is installed."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.planner.plan import Plan
from services.planner.question import demand_of
from services.planner.report import headline, sections
from services.planner.search import search
from services.planner.section import Section
from services.planner.specs import NodeCount, Pool
from shared.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)  # parts of the pool whose rate is drawn
GOOD, OTHER = "#2a6f97", "#bc6c25"
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1b1f23}
body{max-width:72rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem} h2{font-size:1.1rem;margin:2rem 0 .4rem}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .6rem;border-bottom:1px solid #d8dee4;text-align:right}
th.t,td.t{text-align:left} th{color:#57606a;font-weight:600}
p.n{margin:.2rem 0;color:#57606a} figure{margin:1rem 0} svg{max-width:100%;height:auto}
@media (prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}
th,td{border-color:#30363d} th,p.n{color:#9198a1} svg{background:#fff;border-radius:6px}}
"""


def check_html(path: Path) -> None:
    """Raise `ConfigError` before the work rather than after it."""
    if find_spec("matplotlib") is None:
        raise ConfigError(
            f"--html {path} needs matplotlib",
            remedy="pip install 'cellpipe[plot]', or take the tables or --json",
        )
    if not path.parent.is_dir():
        raise ConfigError(f"--html {path}: there is no folder {path.parent}")


def write_html(plan: Plan, path: Path) -> None:
    """One file that needs nothing else. Raises `ConfigError` when it cannot be written."""
    try:
        path.write_text(to_html(plan), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror}") from error


def to_html(plan: Plan) -> str:
    title = f"{plan.model.title} on {plan.pool.name}"
    plots = "".join(
        f'<figure role="img" aria-label="{html.escape(name)}">{_svg(draw)}</figure>'
        for name, draw in (
            ("tokens a second by number of nodes", lambda axes: _draw_rates(plan, axes)),
            ("where a token's time goes", lambda axes: _draw_times(plan, axes)),
            ("memory of a node by slot", lambda axes: _draw_memory(plan, axes)),
            ("what breaks first", lambda axes: _draw_limits(plan, axes)),
        )
    )
    tables = "".join(_table(section) for section in sections(plan))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p>{html.escape(headline(plan))}</p>"
        f"{plots}{tables}</html>\n"
    )


def _table(section: Section) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(
            f"<{tag}{' class=t' if i in section.text_columns else ''}>{html.escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        ) + "</tr>"  # fmt: skip

    notes = "".join(f"<p class=n>{html.escape(note)}</p>" for note in section.notes)
    return (
        f"<h2>{html.escape(section.title)}</h2><table><thead>{row(section.header, 'th')}</thead>"
        f"<tbody>{''.join(row(cells, 'td') for cells in section.rows)}</tbody></table>{notes}"
    )


def _svg(draw: Callable[[Any], None]) -> str:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "cellpipe", "svg.fonttype": "none"}):
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        draw(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def rate_curve(plan: Plan) -> list[tuple[int, float]]:
    """Nodes, and tokens a second of pools of so many, with the same shares of each kind."""
    points = []
    for part in CURVE:
        counts = tuple(
            NodeCount(kind.node, max(1, round(kind.count * part))) for kind in plan.pool.nodes
        )
        pool = Pool(plan.pool.name, counts, plan.pool.network, plan.pool.servers)
        demand = demand_of(plan.model, plan.question)
        wishes = replace(plan.question.wishes, concurrency=None)
        best = search(demand, pool, plan.question.wire, wishes).best
        points.append((pool.num_nodes, best.tokens_per_s if best else 0.0))
    return points


def _draw_rates(plan: Plan, axes: Axes) -> None:
    points = rate_curve(plan)
    axes.plot([n for n, _ in points], [rate for _, rate in points], marker="o", color=GOOD)
    axes.axvline(plan.pool.num_nodes, color=OTHER, linestyle="--", label="this pool")
    axes.set_xlabel("nodes")
    axes.set_ylabel("tokens/s at most")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_times(plan: Plan, axes: Axes) -> None:
    rows = [
        ("next token, alone", plan.times.alone),
        ("next token", plan.times.next_token),
        ("first token", plan.times.first_token),
    ]
    left = [0.0] * len(rows)
    for part in ("dma", "compute", "network", "worker", "queue"):
        values = [getattr(seconds, part) for _, seconds in rows]
        axes.barh([name for name, _ in rows], values, left=left, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel("seconds")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_memory(plan: Plan, axes: Axes) -> None:
    lines = plan.memory[:12]
    names = [f"{line.what} ({line.node.name})" for line in lines]
    left = [0.0] * len(lines)
    for label, values in (
        ("weights", [line.weight_bytes for line in lines]),
        ("sequences", [line.streams * line.sequence_bytes for line in lines]),
        ("worker", [line.working_bytes + line.reserved_bytes for line in lines]),
        ("left", [max(0, line.free_bytes) for line in lines]),
    ):
        parts = [v / line.node.memory_bytes for v, line in zip(values, lines, strict=True)]
        axes.barh(names, parts, left=left, label=label)
        left = [a + b for a, b in zip(left, parts, strict=True)]
    axes.set_xlabel("share of the node's memory")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_limits(plan: Plan, axes: Axes) -> None:
    finite = [limit for limit in plan.limits if math.isfinite(limit.full_at_nodes)]
    limits = finite[:10][::-1]
    colors = [OTHER if limit.full_at_nodes < plan.pool.num_nodes else GOOD for limit in limits]
    axes.barh([limit.what for limit in limits], [x.full_at_nodes for x in limits], color=colors)
    axes.set_xscale("log")
    axes.axvline(plan.pool.num_nodes, color="black", linestyle="--", label="this pool")
    axes.set_xlabel("full at the load of so many nodes")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
