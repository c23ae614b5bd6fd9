"""Counts what was seen: what was lost, came twice, hangs or is wrong, and how long recovery took.

Pure: values in, values out. Knows no process, queue or store.

A request that was accepted (its publish was confirmed) is exactly one of completed, failed (it
ended with an error), stuck (on record, without an end), lost (neither). Beside that it may be
duplicated (a position twice, two ends, a token after the end) and wrong (other tokens than the
undisturbed reference).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from services.chaos.memory import RssTrend
from shared.percentiles import percentile

OVERLAPPING = "overlapping"
# A wait of three times the usual one has been caused by something; 100 ms is scheduling noise.
AFFECTED_FACTOR = 3.0
AFFECTED_MIN_S = 0.1
MAX_SLOWEST = 10


@dataclass(frozen=True, slots=True)
class Observation:
    """One request: what it was to be, what its client saw, what is on record at the end.

    `seen` are the client's tokens as (when, position, token id); `stored` the record's as
    (position, token id), `num_ends` its final events. `num_prompt` is P: the first generated token
    has position P.
    """

    request_id: str
    num_prompt: int
    expected: tuple[int, ...]
    is_accepted: bool
    submitted_s: float
    seen: tuple[tuple[float, int, int], ...] = ()
    stored: tuple[tuple[int, int], ...] = ()
    num_ends: int = 0
    ends_last: bool = True
    is_on_record: bool = True
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that took place. Recovery counts from `over_s`: the port is open, or at once."""

    name: str
    at_s: float
    over_s: float


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a kind of fault to the next token of each request that it held up."""

    num_faults: int
    num_affected: int
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True, slots=True)
class Wait:
    """One long wait of a request: from one token to the next, and what fell into it."""

    request_id: str
    began_s: float
    wait_s: float
    position: int
    faults: tuple[str, ...]


@dataclass(slots=True)
class Verdict:
    """The ledger of a run. `problems` says in words what is off; empty means that all is well."""

    accepted: int = 0
    completed: int = 0
    lost: int = 0
    duplicated: int = 0
    stuck: int = 0
    wrong: int = 0
    failed: int = 0
    refused: int = 0
    num_tokens: int = 0
    load_s: float = 0.0  # from the first request to the last end
    start_cpu_s: float | None = None  # of a core, until a worker serves
    recovery: dict[str, Recovery] = field(default_factory=dict)
    slowest: list[Wait] = field(default_factory=list)
    queues: dict[str, int] = field(default_factory=dict)
    num_leaked_keys: int = 0
    dead_letters: int = 0
    expected_dead_letters: int = 0
    rss: dict[str, RssTrend] = field(default_factory=dict)  # by role/process
    named: dict[str, list[str]] = field(default_factory=dict)  # what is off -> request ids
    problems: list[str] = field(default_factory=list)

    sizes: list[tuple[int, int]] = field(default_factory=list, repr=False)  # prompt, answer

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.load_s if self.load_s else 0.0

    @property
    def is_clean(self) -> bool:
        return not self.problems


def judge_requests(observations: Sequence[Observation]) -> Verdict:
    """The counts of a run's requests; the rest of the verdict is still empty."""
    verdict = Verdict()
    for seen in observations:
        if not seen.is_accepted:
            verdict.refused += 1
            continue
        verdict.accepted += 1
        for name in _faults_of(seen):
            setattr(verdict, name, getattr(verdict, name) + 1)
            if name != "completed":
                verdict.named.setdefault(name, []).append(
                    f"{seen.request_id}{': ' if seen.failure else ''}{seen.failure}"
                )
    for name in ("lost", "duplicated", "stuck", "wrong", "failed"):
        if number := getattr(verdict, name):
            verdict.problems.append(f"{number} of {verdict.accepted} accepted requests {name}")
    return verdict


def _faults_of(seen: Observation) -> list[str]:
    stored_ids = tuple(token_id for _, token_id in seen.stored)
    end = seen.num_prompt + len(seen.stored)
    names = []
    if seen.num_ends == 0:
        names.append("stuck" if seen.is_on_record else "lost")
    elif seen.failure:
        names.append("failed")
    elif len(stored_ids) < len(seen.expected):
        names.append("lost")  # an end without its tokens
    else:
        names.append("completed")
    positions = [position for position, _ in seen.stored]
    came = [position for _, position, _ in seen.seen]
    if (
        len(set(positions)) < len(positions)
        or len(set(came)) < len(came)
        or seen.num_ends > 1
        or not seen.ends_last
        or len(stored_ids) > len(seen.expected)
    ):
        names.append("duplicated")
    is_prefix = stored_ids == seen.expected[: len(stored_ids)]
    in_order = positions == list(range(seen.num_prompt, end))
    as_stored = all((position, token) in seen.stored for _, position, token in seen.seen)
    if "duplicated" not in names and not (is_prefix and in_order and as_stored):
        names.append("wrong")
    return names


def recoveries(
    observations: Sequence[Observation], injected: Sequence[Injected]
) -> dict[str, Recovery]:
    """Recovery by name of fault.

    A wait between two tokens of a request is held up when a fault falls into it and it is three
    times the usual one. One with the restart of a server counts for that, whatever else fell into
    it; one with several names else is "overlapping", because nobody can say which it was for.
    """
    waits = [wait for o in observations for wait in _waits(o)]
    usual = {
        is_first: max(
            AFFECTED_MIN_S,
            AFFECTED_FACTOR * median([b - a for a, b, first in waits if first is is_first] or [0]),
        )
        for is_first in (True, False)
    }
    times: dict[str, list[float]] = {fault.name: [] for fault in injected}
    for began_s, ended_s, is_first in waits:
        if ended_s - began_s <= usual[is_first]:
            continue
        hits = [f for f in injected if f.at_s < ended_s and began_s <= max(f.at_s, f.over_s)]
        # Nothing comes back before the servers are: what else died meanwhile counts for them.
        hits = [fault for fault in hits if fault.over_s > fault.at_s] or hits
        names = {fault.name for fault in hits}
        for fault in hits:
            name = fault.name if len(names) == 1 else OVERLAPPING
            times.setdefault(name, []).append(max(0.0, ended_s - fault.over_s))
    return {
        name: Recovery(
            sum(fault.name == name for fault in injected),
            len(found),
            percentile(found, 0.5),
            percentile(found, 0.99),
        )
        for name, found in sorted(times.items())
    }


def slowest_waits(
    observations: Sequence[Observation], injected: Sequence[Injected], *, began_s: float
) -> list[Wait]:
    """The longest waits, for whoever looks for their cause; `began_s` is second 0."""
    waits = [(b - a, a, b, o, n) for o in observations for n, (a, b, _) in enumerate(_waits(o))]
    return [
        Wait(
            seen.request_id,
            a - began_s,
            wait_s,
            seen.num_prompt + number,
            tuple(f"{f.name} at {f.at_s - began_s:.1f}s" for f in injected if a <= f.at_s < b),
        )
        for wait_s, a, b, seen, number in sorted(waits, key=lambda wait: -wait[0])[:MAX_SLOWEST]
    ]


def _waits(seen: Observation) -> list[tuple[float, float, bool]]:
    """(from, to, whether it is the one for the first token)."""
    times = [seen.submitted_s, *(at_s for at_s, _, _ in seen.seen)]
    return [(a, b, number == 0) for number, (a, b) in enumerate(pairwise(times))]
