"""What an impossible plan lacks, and which changes would make it possible. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from services.planner.cost import ModelCost
from services.planner.question import Question, demand_of
from services.planner.search import Search, search
from services.planner.specs import ModelSpec, Pool


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


def impossible(
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
