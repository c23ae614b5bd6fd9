"""Finds how to lay a model over a pool: strategy, stages, copies of each slot. Pure.

Each choice stays possible when nodes are added, so that more nodes never carry less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.planner.choice import Choice, sequences_in
from services.planner.placement import Placement, Wishes
from services.planner.slices import Demand, num_heads
from services.planner.specs import ExpertMlp, ModelSpec, NodeSpec, Pool
from services.planner.stages import Misfit, Stage, Strategy, cut
from services.planner.timing import Surroundings
from shared.topology import Wire, even_layout

STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
GRID = {1: 1, 2: 32, 3: 8}  # places where the layers of one kind of node may end, by kinds
COARSE_GRID = 5  # of four kinds and more


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
            most = min(demand.max_rows, *(sequences_in(demand, stage) for stage in stages))
            for batch in BATCHES:
                if batch > min(most, wishes.concurrency or math.inf):
                    break
                choice = Choice(demand, around, strategy, stages, batch, pool, wishes)
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
