"""The ledger of a run as text and as JSON. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from services.chaos.memory import RssTrend
from services.chaos.verdict import Recovery, Verdict

COUNTS = ("accepted", "completed", "lost", "duplicated", "stuck", "wrong", "failed", "refused")
MAX_NAMED = 5
MAX_SHOWN_WAITS = 3
MAX_SHOWN_PROCESSES = 16


def to_dict(verdict: Verdict) -> dict[str, Any]:
    """What `--json` prints."""
    counts = {name: getattr(verdict, name) for name in COUNTS}
    found = {**counts, "ok": verdict.is_clean, **asdict(verdict)}
    del found["sizes"]  # of the questions: the seed says as much
    return {**found, "tokens_per_s": verdict.tokens_per_s}


def to_lines(verdict: Verdict) -> list[str]:
    """What a person reads at the end."""
    lines = [f"{name:12}{getattr(verdict, name):8}" for name in COUNTS]
    lines.append(f"{'tokens':12}{verdict.num_tokens:8}  {verdict.tokens_per_s:.1f} a second")
    lines += ["", f"{'recovery from':22}{'times':>6}{'held up':>9}{'p50':>9}{'p99':>9}"]
    lines += [_recovery_line(name, found) for name, found in verdict.recovery.items()]
    lines += [""] + [
        f"waited {wait.wait_s:.2f} s for position {wait.position} of {wait.request_id} "
        f"from {wait.began_s:.1f}s on: {', '.join(wait.faults) or 'no fault'}"
        for wait in verdict.slowest[:MAX_SHOWN_WAITS]
    ]
    lines += [
        "",
        f"queues       {sum(verdict.queues.values())} messages left"
        + "".join(f", {name}: {n}" for name, n in verdict.queues.items() if n),
        f"dead letters {verdict.dead_letters}, garbage sent {verdict.expected_dead_letters}",
        f"keys leaked  {verdict.num_leaked_keys}",
        "",
    ]
    lines += _memory_lines(verdict.rss)
    for name, request_ids in verdict.named.items():
        lines += [f"{name}: {request_id}" for request_id in request_ids[:MAX_NAMED]]
    if verdict.is_clean:
        lines.append("nothing lost, nothing twice, nothing wrong")
    else:
        lines += [f"problem: {problem}" for problem in verdict.problems]
    return lines


def _memory_lines(trends: Mapping[str, RssTrend]) -> list[str]:
    if not trends:
        return ["memory       no process lived long enough to tell", ""]
    fastest = sorted(trends.items(), key=lambda item: -item[1].mb_per_h)[:MAX_SHOWN_PROCESSES]
    lines = [f"{'memory of':38}{'first MB':>10}{'last MB':>10}{'MB/h':>10}{'growth':>9}  flat"]
    for name, trend in fastest:
        flat = {True: "yes", False: "NO", None: "not judged"}[trend.is_flat]
        lines.append(
            f"{name:38}{trend.first_mb:>10.1f}{trend.last_mb:>10.1f}{trend.mb_per_h:>+10.1f}"
            f"{trend.growth:>+9.1%}  {flat}"
        )
    return [*lines, ""]


def _recovery_line(name: str, found: Recovery) -> str:
    return (
        f"{name:22}{found.num_faults or '':>6}{found.num_affected:>9}"
        f"{_seconds(found.p50_s):>9}{_seconds(found.p99_s):>9}"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
