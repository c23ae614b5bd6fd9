"""A run as text and as JSON. The same run gives the same bytes: no clock of ours is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from services.simulator.figures import Percentiles
from services.simulator.simulation import Outcome


def to_dict(outcome: Outcome) -> dict[str, Any]:
    """What `--json` prints."""
    figures, over_s = outcome.figures, outcome.figures.ended_s
    return {
        "world": outcome.world.name,
        "nodes": outcome.num_nodes,
        "spares": outcome.world.num_spares,
        "workers": outcome.num_workers,
        "groups": len(outcome.world.groups),
        "simulated_s": over_s,
        "horizon_s": figures.horizon_s,
        "requests": {
            "arrived": figures.num_arrived,
            "refused": figures.num_refused,
            "completed": figures.num_completed,
            "failed": figures.num_failed,
            "failed_by_reason": dict(sorted(figures.failures.items())),
            "lost": outcome.lost,
            "unfinished": outcome.unfinished,
        },
        "tokens": figures.num_tokens,
        "tokens_per_s": figures.num_tokens / over_s if over_s else 0.0,
        "first_token_s": asdict(Percentiles.of(figures.first_waits_s)),
        "token_s": asdict(Percentiles.of(figures.gaps_s)),
        "whole_s": asdict(Percentiles.of(figures.whole_s)),
        "redriven": figures.num_redrives,
        "handed_over": figures.num_handovers,
        "dead_lettered": figures.num_poisoned,
        "failed_steps": figures.num_failed_steps,
        "quarantines": figures.num_quarantines,
        "node_failures": figures.num_node_failures,
        "process_deaths": figures.num_process_deaths,
        "outages": dict(sorted(figures.outages.items())),
        "replaced": figures.num_replaced,
        "utilisation": outcome.utilisation,
        "shared": {
            name: {
                "utilisation": used,
                "longest_wait_s": outcome.tier_longest_waits_s[name],
            }
            for name, used in outcome.tier_utilisation.items()
        },
        "over_time": figures.over_time(outcome.num_workers),
    }


def to_lines(outcome: Outcome) -> list[str]:
    """What a person reads at the end."""
    seen = to_dict(outcome)
    requests: Mapping[str, Any] = seen["requests"]
    lines = [
        f"{seen['world'] or 'a cluster'}: {seen['nodes']:,} nodes, {seen['spares']:,} of them "
        f"spares, {seen['workers']:,} workers in {seen['groups']} groups",
        "",
        f"{'requests':22}{requests['arrived']:>12,}",
    ]
    lines += [f"  {name:20}{requests[name]:>12,}" for name in _COUNTS]
    lines += [f"    {reason}: {n:,}" for reason, n in requests["failed_by_reason"].items()]
    lines += [
        f"{'tokens':22}{seen['tokens']:>12,}{seen['tokens_per_s']:>12,.1f} a second",
        f"{'re-driven':22}{seen['redriven']:>12,}",
        f"{'handed over':22}{seen['handed_over']:>12,}",
    ]
    lines += [f"{name:22}{seen[key]:>12,}" for name, key in _RARE if seen[key]]
    lines += [
        f"{'nodes that failed':22}{seen['node_failures']:>12,}",
        *(f"  {name:20}{n:>12,} outages" for name, n in seen["outages"].items()),
        f"{'replaced':22}{seen['replaced']:>12,}",
        f"{'utilisation':22}{seen['utilisation']:>12.1%}",
        "",
        f"{'seconds':22}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        _times("to the first token", seen["first_token_s"]),
        _times("from token to token", seen["token_s"]),
        _times("to the last token", seen["whole_s"]),
    ]
    if seen["shared"]:
        lines += ["", f"{'shared':40}{'used':>10}{'longest wait':>16}"]
        lines += [
            f"{name[:39]:40}{part['utilisation']:>10.1%}{part['longest_wait_s']:>14.3f} s"
            for name, part in seen["shared"].items()
        ]
    lines += ["", *_over_time(seen["over_time"])]
    lines.append("nothing lost" if not requests["lost"] else f"LOST: {requests['lost']:,} requests")
    return lines


_COUNTS = ("completed", "failed", "refused", "unfinished", "lost")
_RARE = (
    ("dead letters", "dead_lettered"),
    ("steps that failed", "failed_steps"),
    ("quarantines", "quarantines"),
    ("processes that died", "process_deaths"),
)
NUM_SHOWN = 12


def _times(name: str, found: Mapping[str, float | None]) -> str:
    values = "".join(_seconds(found[key]) for key in ("mean", "p50", "p90", "p99", "max"))
    return f"{name:22}{values}"


def _seconds(value: float | None) -> str:
    return f"{'-':>10}" if value is None else f"{value:>10.3f}"


def _over_time(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"{'at':>8}{'tok/s':>11}{'first p50':>11}{'p99':>9}{'token p50':>11}{'p99':>9}"
        f"{'busy':>7}{'run':>8}{'wait':>8}{'still':>7}{'dead':>7}{'spare':>7}"
    ]
    for row in rows[:: max(1, len(rows) // NUM_SHOWN)]:
        first, token = row["first_token_s"], row["token_s"]
        lines.append(
            f"{row['at_s']:>7.0f}s{row['tokens_per_s']:>11,.1f}"
            f"{_short(first['p50']):>11}{_short(first['p99']):>9}"
            f"{_short(token['p50']):>11}{_short(token['p99']):>9}"
            f"{row['utilisation']:>7.0%}{row['num_running']:>8,}{row['num_waiting']:>8,}"
            f"{row['num_still']:>7,}{row['num_dead_nodes']:>7,}{row['num_spares']:>7,}"
        )
    return [*lines, ""]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
