"""How often nodes fail, what that costs, and how likely enough of them are up. Pure.

Failures are independent and come at a constant rate; a failed node is away for its repair time, so
that each is down for a share u = rate x repair / (1 + rate x repair) of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.planner.placement import Copies, Placement
from services.planner.specs import NodeSpec, Pool
from shared.topology import INBOX_TTL_MS

SPARES_SHOWN = (0, 1, 2, 3)
TARGET = 0.999
MAX_SPARES = 10_000


@dataclass(frozen=True, slots=True)
class Availability:
    """With so many spares of every slot: nodes they take, and the share of time in which all slots
    have their active copies, and in which all have at least one."""

    spares: int
    extra_nodes: int
    full_rate: float
    answers: float


@dataclass(frozen=True, slots=True)
class Failures:
    """What fails and what that costs.

    `mtbf_s` lies between two failures anywhere. One interrupts `sequences_each` sequences for
    `pause_s` each, which is `lost_share` of all their time; its slot is whole again after
    `reload_s`. `spares_for_target` is how many spares of every slot keep the full rate for 99.9 %
    of the time, None if more than 10,000.
    """

    per_hour: float
    mtbf_s: float
    sequences_each: float
    pause_s: float
    lost_share: float
    reload_s: float
    up_share: float
    availability: tuple[Availability, ...]
    spares_for_target: int | None


def down_share(node: NodeSpec) -> float:
    """The part of the time in which a node is away."""
    away = node.failures_per_hour * node.repair_hours
    return away / (1.0 + away)


def mtbf_s(failures_per_hour: float) -> float:
    """Seconds between two failures; infinite without any."""
    return 3600.0 / failures_per_hour if failures_per_hour else math.inf


def at_most_down(num_nodes: int, most: int, down: float) -> float:
    """Probability that no more than `most` of so many independent nodes are away."""
    if most >= num_nodes or down <= 0.0:
        return 1.0
    terms = [
        math.lgamma(num_nodes + 1) - math.lgamma(k + 1) - math.lgamma(num_nodes - k + 1)
        + k * math.log(down) + (num_nodes - k) * math.log1p(-down)
        for k in range(most + 1)
    ]  # fmt: skip
    return min(1.0, math.fsum(math.exp(term) for term in terms))


def full_rate_share(copies: Sequence[Copies], spares: int) -> float:
    """The share of time in which every slot has as many nodes up as it needs."""
    return math.prod(
        at_most_down(each.active + spares, spares, down_share(each.slot.node)) ** each.slot.number
        for each in copies
    )


def answers_share(copies: Sequence[Copies], spares: int) -> float:
    """The share of time in which every slot has a node that is up."""
    return math.prod(
        (1.0 - down_share(each.slot.node) ** (each.active + spares)) ** each.slot.number
        for each in copies
    )


def failures_of(pool: Pool, placement: Placement) -> Failures:
    """What to expect of this placement."""
    copies = placement.copies
    per_hour = pool.failures_per_hour
    pause_s, sequences, reload_s = _one_failure(pool, placement)
    lost = per_hour * sequences * pause_s / 3600.0 / max(1.0, placement.streams)
    availability = tuple(
        Availability(
            spares,
            sum(each.slot.number for each in copies) * spares,
            full_rate_share(copies, spares),
            answers_share(copies, spares),
        )
        for spares in SPARES_SHOWN
    )
    up = sum(kind.count * (1.0 - down_share(kind.node)) for kind in pool.nodes) / pool.num_nodes
    return Failures(
        per_hour, mtbf_s(per_hour), sequences, pause_s, min(1.0, lost), reload_s, up,
        availability, _spares_for(copies, TARGET),
    )  # fmt: skip


def _one_failure(pool: Pool, placement: Placement) -> tuple[float, float, float]:
    """Of a failure somewhere among the placed nodes, means: each sequence's pause, sequences, and
    seconds to load the weights again.

    What was sent to the dead node waits for its inbox to give it up, and another copy of the slot
    reads the rows.
    """
    total = sequences = paused = reload_s = 0.0
    fetch = pool.servers.redis_bytes_per_s
    for each in placement.copies:
        weight = each.num_nodes * each.slot.node.failures_per_hour
        rate = min(each.slot.node.network_bytes_per_s, fetch)
        total += weight
        reload_s += weight * each.slot.weight_bytes / rate
        if each.slot.sequence_bytes:
            held = placement.streams / each.active
        else:  # only what is being worked on
            held = placement.tokens_per_s * each.slot.busy_s / each.active
        sequences += weight * held
        rows_s = pool.servers.redis_round_trip_s + each.slot.sequence_bytes / rate
        paused += weight * held * (INBOX_TTL_MS / 1e3 + rows_s)
    if total == 0.0:
        return 0.0, 0.0, 0.0
    return (paused / sequences if sequences else 0.0), sequences / total, reload_s / total


def _spares_for(copies: Sequence[Copies], target: float) -> int | None:
    low, high = -1, 1
    while full_rate_share(copies, high) < target:
        low, high = high, 2 * high
        if high > MAX_SPARES:
            return None
    if full_rate_share(copies, 0) >= target:
        return 0
    low = max(low, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if full_rate_share(copies, middle) < target else (low, middle)
    return high
