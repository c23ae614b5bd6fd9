"""What a decode step waits for at each layer group, from what workers tell of themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.store.presence_types import STAGES, WorkerInfo

# The last group writes rows that fill a page before a token that ends a request; others send first.
ON_THE_WAY = ("broker", "queue", "decode", "prepare", "compute", "publish")
LAST_ON_THE_WAY = (*ON_THE_WAY, "redis")


@dataclass(frozen=True, slots=True)
class HopSums:
    """Sums over all workers of one group since they started."""

    num_steps: int = 0
    num_turns: int = 0
    stage_us: tuple[int, ...] = (0,) * len(STAGES)

    def plus(self, other: HopSums, sign: int = 1) -> HopSums:
        return HopSums(
            self.num_steps + sign * other.num_steps,
            self.num_turns + sign * other.num_turns,
            tuple(a + sign * b for a, b in zip(self.stage_us, other.stage_us, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class Hop:
    """Means of one group: milliseconds a step by stage, and steps in a batch."""

    group: int
    stage_ms: dict[str, float]
    batch: float
    on_the_way_ms: float


def sums_by_group(workers: Iterable[WorkerInfo], num_groups: int) -> list[HopSums]:
    """What workers with one group each have told."""
    sums = [HopSums()] * num_groups
    for worker in workers:
        if len(worker.groups) == 1 and len(worker.stage_us) == len(STAGES):
            told = HopSums(worker.num_decode_steps, worker.num_decode_turns, worker.stage_us)
            sums[worker.groups[0]] = sums[worker.groups[0]].plus(told)
    return sums


def hops_between(before: Sequence[HopSums], after: Sequence[HopSums]) -> list[HopSums]:
    return [b.plus(a, -1) for a, b in zip(before, after, strict=True)]


def hops_of(sums: Sequence[HopSums]) -> list[Hop]:
    """Means by group; a group that computed no decode step has none."""
    hops = []
    for group, total in enumerate(sums):
        if total.num_steps:
            ms = {
                name: spent_us / total.num_steps / 1e3
                for name, spent_us in zip(STAGES, total.stage_us, strict=True)
            }
            way = LAST_ON_THE_WAY if group == len(sums) - 1 else ON_THE_WAY
            batch = total.num_steps / max(1, total.num_turns)
            hops.append(Hop(group, ms, batch, sum(ms[name] for name in way)))
    return hops
