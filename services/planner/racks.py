"""Which rack each copy of each slot stands in: stages together, copies of a slot apart. Pure.

Copies are placed one round after the other, each round all stages in order: the nodes that send to
each other are neighbours, and a rack that fails takes different slots with it. A stage that fits a
rack is not cut by its edge while the pool has nodes to spare for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from services.planner.choice import stage_slots
from services.planner.placement import Copies, Placement
from services.planner.slices import Demand
from services.planner.specs import Pool


@dataclass(frozen=True, slots=True)
class StageCopy:
    """One copy of a stage's slots: the rack of each node, trunk slots first."""

    stage: int
    copy: int
    racks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """`together` is the share of stage copies within one rack, `least_racks` the fewest racks that
    hold the copies of a stage."""

    together: float
    least_racks: int


def rack_copies(demand: Demand, placement: Placement, pool: Pool) -> list[StageCopy]:
    """Every active copy and spare of every stage. A network without racks is one rack."""
    size = pool.network.rack_size or pool.num_nodes
    numbers = _slots_of_rounds(demand, placement)
    slack = pool.num_nodes - sum(number for _, _, number in numbers)
    found = []
    at = 0
    for stage, copy, number in numbers:
        left = size - at % size
        if number <= size and number > left and left <= slack:
            at, slack = at + left, slack - left
        found.append(StageCopy(stage, copy, tuple((at + i) // size for i in range(number))))
        at += number
    return found


def spread_of(copies: Sequence[StageCopy]) -> Spread:
    """How far neighbours are together and copies apart."""
    by_stage: dict[int, set[int]] = {}
    for each in copies:
        by_stage.setdefault(each.stage, set()).update(each.racks)
    together = sum(len(set(each.racks)) == 1 for each in copies)
    return Spread(together / len(copies), min(len(racks) for racks in by_stage.values()))


def _slots_of_rounds(demand: Demand, placement: Placement) -> list[tuple[int, int, int]]:
    """(stage, copy, number of slots that have so many copies), round after round."""
    kinds = list(_kinds(demand, placement))
    rounds = max(c.active + c.spares for pair in kinds for c, _ in pair)
    found = []
    for copy in range(rounds):
        for stage, pair in enumerate(kinds):
            number = sum(each for c, each in pair if c.active + c.spares > copy)
            if number:
                found.append((stage, copy, number))
    return found


def _kinds(demand: Demand, placement: Placement) -> Iterator[list[tuple[Copies, int]]]:
    """Of each stage: its kinds of slots, and how many it has of each."""
    by_slot = {replace(copies.slot, number=1): copies for copies in placement.copies}
    for stage, step in zip(placement.stages, placement.steps, strict=True):
        trunk, experts = stage_slots(demand, stage, step)
        found = [(by_slot[trunk], stage.width)]
        if experts is not None:
            found.append((by_slot[experts], stage.expert_slots))
        yield found
