"""The plan of a model on a pool: placement, times, bill, failures and loads in one value. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from services.planner.bill import Bill, bill
from services.planner.cost import MAX_SLICE_ROWS, ModelCost, model_cost, slice_rows
from services.planner.failures import Failures, failures_of
from services.planner.load import Limit, ServerLoad, limits, server_load
from services.planner.placement import Placement, Search, Wishes, search
from services.planner.specs import ModelSpec, NodeSpec, Pool
from services.planner.stages import Demand, Stage, room_bytes
from services.planner.timing import Seconds, Surroundings, stage_step
from shared.errors import ConfigError
from shared.topology import Wire

DEFAULT_PROMPT = 512


@dataclass(frozen=True, slots=True)
class Question:
    """What is planned. `prompt` tokens are part of `context`."""

    bits: int = 4
    context: int = 4096
    prompt: int = DEFAULT_PROMPT
    wire: Wire = Wire.F32
    wishes: Wishes = field(default_factory=Wishes)
    price_per_kwh: float = 0.5
    currency: str = "yuan"


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


@dataclass(frozen=True, slots=True)
class Change:
    """A change that would make a plan possible."""

    what: str
    question: Question | None = None
    add_nodes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Impossible:
    """Why there is no plan, by strategy, and what would make one, smallest change first."""

    model: ModelSpec
    pool: Pool
    question: Question
    cost: ModelCost
    reasons: dict[str, str]
    changes: tuple[Change, ...]


def make_plan(model: ModelSpec, pool: Pool, question: Question) -> Plan | Impossible:
    """Plan a model on a pool. Raises `ConfigError` for values that no plan could have."""
    _check(model, question)
    cost = model_cost(model, question.bits, question.context)
    demand = demand_of(model, question)
    found = search(demand, pool, question.wire, question.wishes)
    placement = found.best
    if placement is None:
        return _impossible(model, pool, question, cost, found)
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


def demand_of(model: ModelSpec, question: Question) -> Demand:
    rows = slice_rows(model)
    return Demand(model, question.bits, question.context, question.prompt, rows)


def _check(model: ModelSpec, question: Question) -> None:
    wishes = question.wishes
    if not 1 <= question.prompt <= question.context:
        raise ConfigError(
            f"--prompt must be in 1..{question.context} (--context), got {question.prompt}"
        )
    if wishes.concurrency is not None and wishes.concurrency < 1:
        raise ConfigError(f"--concurrency must be 1 or more, got {wishes.concurrency}")
    if wishes.groups is not None and not 1 <= wishes.groups <= model.num_hidden_layers:
        raise ConfigError(
            f"--groups must be in 1..{model.num_hidden_layers} (the model's layers), "
            f"got {wishes.groups}"
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
    steps = [stage_step(demand, around, s, rows, max(1, prompt // 2)).latency for s in stages]
    total = Seconds()
    for step in steps:
        total = total.plus(step)
    slowest = max(steps, key=lambda step: step.total - step.network)
    behind = number - 1
    return total.plus(
        Seconds(
            slowest.dma * behind, slowest.compute * behind, 0.0, slowest.worker * behind
        )
    )  # fmt: skip


def _impossible(
    model: ModelSpec, pool: Pool, question: Question, cost: ModelCost, found: Search
) -> Impossible:
    changes: list[Change] = []
    if found.shortages:
        short = min(found.shortages.values(), key=lambda each: sum(each.values()))
        names = " and ".join(f"{number:,} more {name}" for name, number in short.items())
        changes.append(Change(names, add_nodes=tuple(short.items())))
    wishes = question.wishes
    if wishes.spares:
        changes += _try(model, pool, replace(question, wishes=replace(wishes, spares=0)),
                        "no spares (--spares 0)")  # fmt: skip
    if wishes.groups is not None:
        changes += _try(model, pool, replace(question, wishes=replace(wishes, groups=None)),
                        "another number of layer groups (leave out --groups)")  # fmt: skip
    if wishes.strategy is not None:
        changes += _try(model, pool, replace(question, wishes=replace(wishes, strategy=None)),
                        "another strategy (leave out --strategy)")  # fmt: skip
    if wishes.max_token_s < math.inf:
        slower = replace(question, wishes=replace(wishes, max_token_s=math.inf))
        changes += _try(model, pool, slower, "more time for a token (--max-token-time)")
    for bits in (8, 4):
        if bits < question.bits:
            fewer = _try(model, pool, replace(question, bits=bits), f"--bits {bits}")
            changes += fewer
            if fewer:
                break
    changes += _shorter(model, pool, question)
    if not changes:
        changes += _larger_memory(model, pool, question)
    return Impossible(
        model, pool, question, cost, {str(k): why for k, why in found.misfits.items()},
        tuple(changes),
    )  # fmt: skip


def _is_possible(model: ModelSpec, pool: Pool, question: Question) -> bool:
    found = search(demand_of(model, question), pool, question.wire, question.wishes)
    return bool(found.placements)


def _try(model: ModelSpec, pool: Pool, question: Question, what: str) -> list[Change]:
    return [Change(what, question)] if _is_possible(model, pool, question) else []


def _shorter(model: ModelSpec, pool: Pool, question: Question) -> list[Change]:
    """The longest context that fits, if any does."""

    def at(context: int) -> Question:
        return replace(question, context=context, prompt=min(question.prompt, context))

    low, high = 1, question.context
    if high == 1 or not _is_possible(model, pool, at(low)):
        return []
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if _is_possible(model, pool, at(middle)) else (low, middle)
    return [Change(f"--context {low}", at(low))]


def _larger_memory(model: ModelSpec, pool: Pool, question: Question) -> list[Change]:
    """How much memory a node would need, if that many nodes of the largest kind had it."""
    largest = max((kind.node for kind in pool.nodes), key=lambda node: node.memory_bytes)

    def with_memory(num_bytes: int) -> Pool:
        grown = replace(largest, memory_bytes=num_bytes)
        nodes = tuple(
            replace(kind, node=grown) if kind.node is largest else kind for kind in pool.nodes
        )
        return replace(pool, nodes=nodes)

    low, high = largest.memory_bytes, 2 * largest.memory_bytes
    while not _is_possible(model, with_memory(high), question):
        low, high = high, 2 * high
        if high > 1 << 50:
            return []
    while high - low > low // 64:
        middle = (low + high) // 2
        if _is_possible(model, with_memory(middle), question):
            high = middle
        else:
            low = middle
    return [Change(f"{high / 1e6:,.0f} MB of memory on each {largest.name}")]
