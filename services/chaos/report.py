"""The ledger of a run as text and as JSON. Decides nothing."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from services.chaos.verdict import Recovery, Verdict

COUNTS = ("accepted", "completed", "lost", "duplicated", "stuck", "wrong", "failed", "refused")
MAX_NAMED = 5
MAX_SHOWN_WAITS = 3


def to_dict(verdict: Verdict) -> dict[str, Any]:
    """What `--json` prints."""
    counts = {name: getattr(verdict, name) for name in COUNTS}
    return {**counts, "ok": verdict.is_clean, **asdict(verdict)}


def to_lines(verdict: Verdict) -> list[str]:
    """What a person reads at the end."""
    lines = [f"{name:12}{getattr(verdict, name):8}" for name in COUNTS]
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
        "memory       "
        + (
            ", ".join(f"{role} {mb:+.1f} MB/min" for role, mb in verdict.rss_mb_per_min.items())
            or "no process lived long enough to tell"
        ),
        "",
    ]
    for name, request_ids in verdict.named.items():
        lines += [f"{name}: {request_id}" for request_id in request_ids[:MAX_NAMED]]
    if verdict.is_clean:
        lines.append("nothing lost, nothing twice, nothing wrong")
    else:
        lines += [f"problem: {problem}" for problem in verdict.problems]
    return lines


def _recovery_line(name: str, found: Recovery) -> str:
    return (
        f"{name:22}{found.num_faults or '':>6}{found.num_affected:>9}"
        f"{_seconds(found.p50_s):>9}{_seconds(found.p99_s):>9}"
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
