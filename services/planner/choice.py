"""One way to lay a model over a pool: how many copies of each slot carry what rate. Pure.

A choice is a strategy, kinds of nodes for runs of layers, room for so many sequences in each slot
and a batch. What a choice carries is the largest rate of tokens for which its slots need no more
nodes than there are, and each choice stays possible when nodes are added: more nodes never carry
less.

A rate of X tokens a second with T seconds a token has X·T sequences in flight (Little's law). Each
copy of a slot has room for some of these and time for some of X; both say how many copies it takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from services.planner.placement import Copies, Placement, Slot, Wishes
from services.planner.slices import Demand, room_bytes
from services.planner.specs import Pool
from services.planner.stages import Stage, Strategy
from services.planner.timing import Seconds, StageStep, Surroundings, Traffic, stage_step

RATE_STEPS = 60  # of a bisection: the last bits of a double


class Choice:
    """One cut at one batch."""

    def __init__(
        self,
        demand: Demand,
        around: Surroundings,
        strategy: Strategy,
        stages: tuple[Stage, ...],
        batch: int,
        pool: Pool,
        wishes: Wishes,
    ) -> None:
        self._strategy = strategy
        self._stages = stages
        self._batch = batch
        self._pool = pool
        self._wishes = wishes
        self._steps = tuple(stage_step(demand, around, s, batch, demand.context) for s in stages)
        self._latency = Seconds()
        self._traffic = Traffic()
        for step in self._steps:
            self._latency = self._latency.plus(step.latency)
            self._traffic = self._traffic.plus(step.traffic)
        self._slots = _slots(demand, stages, self._steps)
        self.least_nodes = sum(slot.number for slot in self._slots) * (1 + wishes.spares)
        self._counts = {kind.node.name: kind.count for kind in pool.nodes}

    def lacking(self) -> dict[str, int]:
        """Nodes by kind that are missing for one copy of each slot and its spares."""
        need: Counter[str] = Counter()
        for slot in self._slots:
            need[slot.node.name] += slot.number * (1 + self._wishes.spares)
        return {
            name: number - self._counts[name]
            for name, number in need.items()
            if number > self._counts[name]
        }

    def place(self, best: Placement | None) -> Placement | None:
        """None if it cannot be, or carries less than `best`."""
        token_s = self._latency.total
        if token_s > self._wishes.max_token_s:
            return None
        if not self._fits(0.0):
            return None
        ceiling, bound = self._ceiling()
        if best is not None and ceiling < best.tokens_per_s:
            return None
        rate = self._rate(ceiling)
        if rate < ceiling * (1 - 1e-9):
            bound = self._tightest(rate)
        if rate <= 0:
            return None
        copies = tuple(Copies(slot, self._active(slot, rate), 0) for slot in self._slots)
        return Placement(
            self._strategy,
            self._stages,
            self._batch,
            self._steps,
            self._with_spares(copies),
            rate,
            float(self._wishes.concurrency or rate * token_s),
            self._latency,
            Traffic(self._traffic.messages / self._batch, self._traffic.num_bytes / self._batch),
            bound,
        )

    def _active(self, slot: Slot, rate: float) -> int:
        """Copies that a rate takes, by their time and by their room."""
        in_flight = rate * self._latency.total
        return max(
            1,
            math.ceil(rate * slot.busy_s - 1e-9),
            math.ceil(in_flight / slot.streams - 1e-9),
        )

    def _fits(self, rate: float) -> bool:
        need: Counter[str] = Counter()
        for slot in self._slots:
            copies = self._active(slot, rate) + self._wishes.spares
            need[slot.node.name] += slot.number * copies
        return all(number <= self._counts[name] for name, number in need.items())

    def _ceiling(self) -> tuple[float, str]:
        """A rate that cannot be passed, whatever the rounding of copies."""
        limits = []
        if self._wishes.concurrency is not None:
            limits.append((self._wishes.concurrency / self._latency.total, "the concurrency"))
        work: Counter[str] = Counter()
        spares: Counter[str] = Counter()
        for slot in self._slots:
            each = max(slot.busy_s, self._latency.total / slot.streams)
            work[slot.node.name] += slot.number * each  # type: ignore[assignment]
            spares[slot.node.name] += slot.number * self._wishes.spares
        for name, seconds in work.items():
            limits.append(((self._counts[name] - spares[name]) / seconds, f"the nodes of {name}"))
        limits += self._host_limits()
        return min(limits)

    def _host_limits(self) -> list[tuple[float, str]]:
        """Workers that are processes of one machine share its cores."""
        hosts = {slot.node for slot in self._slots if slot.node.host_cores}
        limits = []
        for host in hosts:
            busy_s = sum(s.number * s.busy_s for s in self._slots if s.node == host)
            busy_s += self._traffic.messages / self._batch * host.hop_cpu_s
            limits.append((host.host_cores / busy_s, f"the cores of {host.name}"))
        return limits

    def _rate(self, ceiling: float) -> float:
        if self._fits(ceiling):
            return ceiling
        low, high = 0.0, ceiling
        for _ in range(RATE_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._fits(middle) else (low, middle)
        return low

    def _tightest(self, rate: float) -> str:
        """What the slot that would need another node first is short of."""

        def next_rate(slot: Slot) -> tuple[float, str]:
            copies = self._active(slot, rate)
            by_time = copies / slot.busy_s if slot.busy_s else math.inf
            by_room = copies * slot.streams / self._latency.total
            why = "time" if by_time <= by_room else "memory for sequences"
            return min(by_time, by_room), f"{why} of {slot.what} on {slot.node.name}"

        return min(next_rate(slot) for slot in self._slots)[1]

    def _with_spares(self, copies: tuple[Copies, ...]) -> tuple[Copies, ...]:
        """All nodes that are left stand in for others, evenly."""
        found = []
        left = dict(self._counts)
        for each in copies:
            left[each.slot.node.name] -= each.num_nodes
        slots: Counter[str] = Counter()
        for each in copies:
            slots[each.slot.node.name] += each.slot.number
        for each in copies:
            name = each.slot.node.name
            found.append(Copies(each.slot, each.active, left[name] // slots[name]))
        return tuple(found)


def _slots(demand: Demand, stages: Sequence[Stage], steps: Sequence[StageStep]) -> tuple[Slot, ...]:
    """The slots of all stages, alike ones together."""
    counted: Counter[Slot] = Counter()
    for stage, step in zip(stages, steps, strict=True):
        trunk, experts = stage_slots(demand, stage, step)
        counted[trunk] += stage.width
        if experts is not None:
            counted[experts] += stage.expert_slots
    return tuple(replace(slot, number=number) for slot, number in counted.items())


@lru_cache(maxsize=1 << 16)
def stage_slots(demand: Demand, stage: Stage, step: StageStep) -> tuple[Slot, Slot | None]:
    """A stage's trunk slot and its expert slot, each with the number 1."""
    trunk = Slot(
        _name(stage), stage.node, 1, stage.weight_bytes, stage.sequence_bytes,
        sequences_in(demand, stage), step.trunk_busy_s / step.batch,
    )  # fmt: skip
    if stage.expert_node is None:
        return trunk, None
    name = f"{max(1, round(stage.experts_per_slot))} experts"
    experts = Slot(
        name, stage.expert_node, 1, stage.expert_slot_bytes, 0, math.inf,
        step.expert_busy_s / step.batch,
    )  # fmt: skip
    return trunk, experts


def sequences_in(demand: Demand, stage: Stage) -> float:
    """Sequences that have room in one trunk slot."""
    if stage.sequence_bytes == 0:
        return math.inf
    return (room_bytes(stage.node, demand) - stage.weight_bytes) // stage.sequence_bytes


def _name(stage: Stage) -> str:
    """What a slot of a stage holds, without saying which layers."""
    names = []
    if stage.embeds:
        names.append("embedding")
    if stage.num_layers:
        noun = "trunk" if stage.expert_node is not None else "layer"
        names.append(f"{stage.num_layers} {noun}{'s' if stage.num_layers > 1 else ''}")
    if stage.has_head:
        names.append("head")
    name = " + ".join(names)
    return f"1/{stage.width} of {name}" if stage.width > 1 else name
