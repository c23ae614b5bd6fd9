"""The plan of a model on a pool: placement, times, bill, failures and loads in one value. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.planner.bill import Bill, bill
from services.planner.cost import MAX_SLICE_ROWS, ModelCost, model_cost
from services.planner.failures import Failures, failures_of
from services.planner.load import Limit, ServerLoad, limits, server_load
from services.planner.missing import Impossible, impossible
from services.planner.placement import Placement
from services.planner.question import Question, check_question, demand_of
from services.planner.search import Search, search
from services.planner.slices import Demand, room_bytes
from services.planner.specs import ModelSpec, NodeSpec, Pool
from services.planner.stages import Stage
from services.planner.timing import Seconds, Surroundings, stage_step


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """A slot's memory on one node: what is in it, and what is left. Bytes."""

    what: str
    node: NodeSpec
    number: int
    copies: int
    weight_bytes: int
    sequence_bytes: int
    streams: int
    working_bytes: int
    reserved_bytes: int

    @property
    def free_bytes(self) -> int:
        return (
            self.node.memory_bytes - self.reserved_bytes - self.working_bytes
            - self.weight_bytes - self.streams * self.sequence_bytes
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds to the first token, from token to token, and of one stream alone."""

    first_token: Seconds
    next_token: Seconds
    alone: Seconds


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is said of a model on a pool."""

    model: ModelSpec
    pool: Pool
    question: Question
    demand: Demand
    cost: ModelCost
    search: Search
    placement: Placement
    memory: tuple[MemoryLine, ...]
    times: Times
    bill: Bill
    failures: Failures
    load: ServerLoad
    limits: tuple[Limit, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.placement.tokens_per_s

    @property
    def resident_sequences(self) -> float:
        """Sequences that have room at a time; others wait until one ends."""
        rooms = [c.active * c.slot.streams for c in self.placement.copies if c.slot.sequence_bytes]
        return min(rooms, default=math.inf)

    @property
    def replicas(self) -> float:
        """Copies of the whole model that the pool's active slots hold, by weight."""
        active = sum(c.active * c.slot.number * c.slot.weight_bytes for c in self.placement.copies)
        once = sum(c.slot.number * c.slot.weight_bytes for c in self.placement.copies)
        return active / once


def make_plan(model: ModelSpec, pool: Pool, question: Question) -> Plan | Impossible:
    """Plan a model on a pool. Raises `ConfigError` for values that no plan could have."""
    check_question(model, question)
    cost = model_cost(model, question.bits, question.context)
    demand = demand_of(model, question)
    found = search(demand, pool, question.wire, question.wishes)
    placement = found.best
    if placement is None:
        return impossible(model, pool, question, cost, found)
    load = server_load(demand, pool, placement)
    return Plan(
        model,
        pool,
        question,
        demand,
        cost,
        found,
        placement,
        tuple(_memory(demand, placement)),
        _times(demand, pool, question, placement),
        bill(
            pool.watts,
            placement.tokens_per_s,
            price_per_kwh=question.price_per_kwh,
            currency=question.currency,
        ),
        failures_of(pool, placement),
        load,
        tuple(limits(pool, placement, load)),
    )


def _memory(demand: Demand, placement: Placement) -> list[MemoryLine]:
    """Where all sequences in flight are shared out over the active copies."""
    lines = []
    for each in placement.copies:
        slot = each.slot
        held = math.ceil(placement.streams / each.active) if slot.sequence_bytes else 0
        room = room_bytes(slot.node, demand)
        working = slot.node.memory_bytes - slot.node.reserved_bytes - room
        most = int(min(slot.streams, 1 << 40)) if slot.sequence_bytes else 0
        lines.append(
            MemoryLine(
                slot.what, slot.node, slot.number, each.active + each.spares, slot.weight_bytes,
                slot.sequence_bytes, min(held, most), working, slot.node.reserved_bytes,
            )
        )  # fmt: skip
    return lines


def _times(demand: Demand, pool: Pool, question: Question, placement: Placement) -> Times:
    around = Surroundings(pool.network, pool.servers, question.wire)
    waiting = max(0.0, placement.token_s - placement.latency.total)
    next_token = placement.latency.plus(Seconds(queue=waiting))
    alone = Seconds()
    for stage in placement.stages:
        alone = alone.plus(stage_step(demand, around, stage, 1, demand.context).latency)
    first = first_token(demand, around, placement.stages, demand.prompt)
    return Times(first.plus(Seconds(queue=waiting)), next_token, alone)


def first_token(
    demand: Demand, around: Surroundings, stages: tuple[Stage, ...], prompt: int
) -> Seconds:
    """A prompt in slices through all stages: the last slice leaves the slowest stage when all
    before it have, and passes the others alone. Attention is that of the prompt's middle."""
    rows = min(demand.max_rows, MAX_SLICE_ROWS, prompt)
    number = math.ceil(prompt / rows)
    rows = math.ceil(prompt / number)
    steps = [stage_step(demand, around, s, rows, max(1, prompt // 2), True).latency for s in stages]
    total = Seconds()
    for step in steps:
        total = total.plus(step)
    slowest = max(steps, key=lambda step: step.total - step.network)
    behind = number - 1
    return total.plus(
        Seconds(
            slowest.dma * behind,
            slowest.compute * behind,
            around.servers.admission_s,
            slowest.worker * behind,
        )
    )  # fmt: skip
