"""Finds how to lay a model over a pool: strategy, stages, copies of each slot. Pure.

A choice is a strategy, kinds of nodes for runs of layers, room for so many sequences in each slot
and a batch. What a choice carries is the largest rate of tokens for which its slots need no more
nodes than there are, and each choice stays possible when nodes are added: more nodes never carry
less.

A rate of X tokens a second with T seconds a token has X·T sequences in flight (Little's law). Each
copy of a slot has room for some of these and time for some of X; both say how many copies it takes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.planner.specs import ExpertMlp, ModelSpec, NodeSpec, Pool
from services.planner.stages import Demand, Misfit, Stage, Strategy, cut, num_heads, room_bytes
from services.planner.timing import Seconds, StageStep, Surroundings, Traffic, stage_step
from shared.topology import Wire, even_layout

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
GRID = {1: 1, 2: 96, 3: 24}  # places where the layers of one kind of node may end, by kinds
COARSE_GRID = 8
RATE_STEPS = 60  # of a bisection: the last bits of a double


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked of a placement beside the model.

    `concurrency` sequences at a time; None is as many as bring the most tokens. `spares` nodes of
    every slot may fail without a loss of rate. `groups` and `strategy` leave no choice.
    `max_token_s` is the longest time from token to token.
    """

    concurrency: int | None = None
    spares: int = 0
    groups: int | None = None
    strategy: Strategy | None = None
    max_token_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Slot:
    """Weights that one node holds, `number` different ones that are alike.

    `busy_s` is what a token costs one of them on average; `streams` sequences have room in a copy.
    """

    what: str
    node: NodeSpec
    number: int
    weight_bytes: int
    sequence_bytes: int
    streams: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Copies:
    """A slot, and how many nodes hold each of its number: `active` carry the rate."""

    slot: Slot
    active: int
    spares: int

    @property
    def num_nodes(self) -> int:
        return self.slot.number * (self.active + self.spares)


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice, and what it carries.

    `tokens_per_s` of all sequences together with `streams` in flight at `batch` a step; `token_s`
    is the time from token to token of one of them, `latency` that of a token that waits for nobody.
    Rates are bounds (Denning and Buzen's operational laws): random arrivals stay below them.
    """

    strategy: Strategy
    stages: tuple[Stage, ...]
    batch: int
    steps: tuple[StageStep, ...]
    copies: tuple[Copies, ...]
    tokens_per_s: float
    streams: float
    latency: Seconds
    traffic: Traffic
    bound: str

    @property
    def token_s(self) -> float:
        return self.streams / self.tokens_per_s

    @property
    def num_slots(self) -> int:
        return sum(copies.slot.number for copies in self.copies)

    @property
    def num_nodes(self) -> int:
        return sum(copies.num_nodes for copies in self.copies)


@dataclass(frozen=True, slots=True)
class Search:
    """The best placement of each strategy, or why there is none."""

    placements: dict[Strategy, Placement]
    misfits: dict[Strategy, str]
    shortages: dict[Strategy, dict[str, int]]  # the fewest nodes by kind that would make one
    least_nodes: dict[Strategy, int]  # that the strategy takes with the kinds there are

    @property
    def best(self) -> Placement | None:
        found = list(self.placements.values())
        return max(found, key=_order) if found else None


def search(demand: Demand, pool: Pool, wire: Wire, wishes: Wishes) -> Search:
    """Try every choice, each strategy for itself."""
    around = Surroundings(pool.network, pool.servers, wire)
    placements: dict[Strategy, Placement] = {}
    misfits: dict[Strategy, str] = {}
    shortages: dict[Strategy, dict[str, int]] = {}
    least: dict[Strategy, int] = {}
    for strategy in Strategy if wishes.strategy is None else [wishes.strategy]:
        if strategy is Strategy.EXPERT and not _has_experts(demand.model):
            misfits[strategy] = "the model has no routed experts"
            continue
        best: Placement | None = None
        why: list[Misfit] = []
        lacking: list[dict[str, int]] = []
        needed: list[int] = []
        for stages in _cuts(demand, pool, strategy, wishes, why):
            for batch in BATCHES:
                if batch > demand.max_rows or batch > (wishes.concurrency or math.inf):
                    break
                choice = _Choice(demand, around, strategy, stages, batch, pool, wishes)
                lacking.append(choice.lacking())
                needed.append(choice.least_nodes)
                found = choice.place(best)
                if found is not None and (best is None or _order(found) > _order(best)):
                    best = found
        if needed:
            least[strategy] = min(needed)
        if best is not None:
            placements[strategy] = best
        elif needed:
            short = min(lacking, key=lambda each: sum(each.values()))
            if short:
                shortages[strategy] = short
                names = " and ".join(f"{number:,} {name}" for name, number in short.items())
                misfits[strategy] = f"the pool lacks {names}: it takes {min(needed):,} nodes"
            else:
                misfits[strategy] = f"no token comes within {wishes.max_token_s:g} s"
        else:
            widest = max(misfit.width for misfit in why)
            last = [misfit for misfit in why if misfit.width == widest]
            misfits[strategy] = str(min(last, key=lambda m: m.need_bytes / m.room_bytes))
    return Search(placements, misfits, shortages, least)


def _order(placement: Placement) -> tuple[float, float, int]:
    return (placement.tokens_per_s, -placement.latency.total, -placement.num_slots)


def _has_experts(model: ModelSpec) -> bool:
    return any(isinstance(layer.mlp, ExpertMlp) for layer in model.layers)


def _cuts(
    demand: Demand, pool: Pool, strategy: Strategy, wishes: Wishes, why: list[Misfit]
) -> Iterator[tuple[Stage, ...]]:
    """Each different cut once; what does not fit is added to `why`."""
    seen: set[tuple[Stage, ...]] = set()
    bounds = None
    if wishes.groups is not None:
        bounds = even_layout("", demand.model.num_hidden_layers, wishes.groups).bounds
    for runs in _assignments(demand.model, pool, strategy):
        for width in _widths(demand.model, strategy):
            for streams in STREAMS:
                stages: list[Stage] = []
                for node, expert_node, layers in runs:
                    part = cut(
                        demand, strategy, node, expert_node, layers, streams,
                        width=width, bounds=bounds,
                    )  # fmt: skip
                    if isinstance(part, Misfit):
                        why.append(part)
                        break
                    stages += part
                else:
                    key = tuple(stages)
                    if key not in seen:
                        seen.add(key)
                        yield key
                    continue
                break  # more sequences fit even less


_Run = tuple[NodeSpec, NodeSpec, range]


def _assignments(model: ModelSpec, pool: Pool, strategy: Strategy) -> Iterator[tuple[_Run, ...]]:
    """Which kinds of nodes get which layers: every set of kinds, fast ones first, and ends on a
    grid that depends on the number of kinds alone; for experts, one kind for trunks and another for
    experts too."""
    kinds = sorted(
        (kind.node for kind in pool.nodes), key=lambda n: (-n.weight_bytes_per_s, n.name)
    )
    last = model.num_hidden_layers
    for size in range(1, len(kinds) + 1):
        grid = GRID.get(size, COARSE_GRID)
        ends = sorted({round(last * i / grid) for i in range(1, grid)} - {0, last})
        for chosen in itertools.combinations(kinds, size):
            for inner in itertools.combinations(ends, size - 1):
                edges = (0, *inner, last)
                yield tuple(
                    (node, node, range(first, end))
                    for node, first, end in zip(chosen, edges, edges[1:], strict=False)
                )
    if strategy is Strategy.EXPERT:
        for node, expert_node in itertools.permutations(kinds, 2):
            yield ((node, expert_node, range(last)),)


def _widths(model: ModelSpec, strategy: Strategy) -> Sequence[int]:
    if strategy is not Strategy.TENSOR:
        return (1,)
    most = min(num_heads(layer) for layer in set(model.layers))
    widths = [2**power for power in range(1, most.bit_length()) if 2**power <= most]
    return [*widths, most] if most not in widths else widths


class _Choice:
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
        if any(self._batch > slot.streams for slot in self._slots):
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
        free = room_bytes(stage.node, demand) - stage.weight_bytes
        streams = free // stage.sequence_bytes if stage.sequence_bytes else math.inf
        what = _name(stage)
        trunk = Slot(
            what, stage.node, 1, stage.weight_bytes, stage.sequence_bytes, streams,
            step.trunk_busy_s / step.batch,
        )  # fmt: skip
        counted[trunk] += stage.width
        if stage.expert_node is not None:
            experts = Slot(
                f"{max(1, round(stage.experts_per_slot))} experts", stage.expert_node, 1,
                stage.expert_slot_bytes, 0, math.inf, step.expert_busy_s / step.batch,
            )  # fmt: skip
            counted[experts] += stage.expert_slots
    return tuple(
        Slot(s.what, s.node, number, s.weight_bytes, s.sequence_bytes, s.streams, s.busy_s)
        for s, number in counted.items()
    )


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
