"""The part of a plan's report that is about running it: times, power, failures, servers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from services.planner.plan import Plan
from services.planner.section import Section
from services.planner.timing import Seconds
from services.planner.units import (
    human_bytes,
    human_count,
    human_seconds,
    scaled,
    share,
    three_digits,
    times_full,
)


def times_section(plan: Plan) -> Section:
    times = plan.times
    rows = [
        _time_row(f"first token of {plan.question.prompt}", times.first_token),
        _time_row("next token", times.next_token),
        _time_row("next token, alone", times.alone),
    ]
    return Section(
        "Where a token's time goes",
        ("", "DMA", "compute", "network", "worker", "queue", "all"),
        tuple(rows),
        ("DMA is what streaming of chunks takes beyond computing on them, behind double buffers",),
    )


def _time_row(name: str, seconds: Seconds) -> tuple[str, ...]:
    parts = (seconds.dma, seconds.compute, seconds.network, seconds.worker, seconds.queue)
    return (name, *(human_seconds(part) if part else "-" for part in parts),
            human_seconds(seconds.total))  # fmt: skip


def bill_section(plan: Plan) -> Section:
    bill = plan.bill
    price = f"{plan.question.price_per_kwh:g} {bill.currency}/kWh"
    rows = [
        ("power", f"{scaled(bill.watts)}W"),
        ("energy a year", f"{human_count(bill.kwh_a_year)} kWh"),
        (f"cost a year at {price}", f"{human_count(bill.cost_a_year)} {bill.currency}"),
        ("energy of a million tokens", f"{scaled(bill.joules_a_million_tokens)}J"),
        ("cost of a million tokens", f"{human_count(bill.cost_a_million_tokens)} {bill.currency}"),
    ]
    return Section("The bill", ("", ""), tuple(rows))


def failures_section(plan: Plan) -> Section:
    failures = plan.failures
    rows = [
        (
            f"{each.spares}",
            f"{each.extra_nodes:,}",
            share(each.full_rate),
            share(each.answers),
        )
        for each in failures.availability
    ]
    notes = [
        f"{three_digits(failures.per_hour)} failures an hour, one each "
        f"{human_seconds(failures.mtbf_s)}; {share(failures.up_share)} of the nodes are up",
        f"one interrupts {three_digits(failures.sequences_each)} sequences for "
        f"{human_seconds(failures.pause_s)} each, {share(failures.lost_share)} of all their time; "
        f"loading its weights again takes {human_seconds(failures.reload_s)}",
        _spares_needed(plan),
    ]
    return Section(
        "Failures: the share of time with so many spares of each slot",
        ("spares", "nodes for them", "full rate", "answers at all"),
        tuple(rows),
        tuple(notes),
        frozenset(),
    )


def _too_much(plan: Plan) -> Iterator[str]:
    """What one cluster of the largest size cannot carry, and the tokens that it could."""
    load, servers = plan.load, plan.pool.servers
    for what, needed, most, noun in (
        ("RabbitMQ cluster", load.broker_nodes, servers.broker_max_nodes, "nodes"),
        ("Redis Cluster", load.redis_shards, servers.redis_max_shards, "shards"),
    ):
        if needed > most:
            worst = max(
                limit.utilisation for limit in plan.limits
                if limit.what.startswith(f"a {what} of {most},")
            )  # fmt: skip
            rate = plan.tokens_per_s
            yield (
                f"{needed:,} {noun} are more than a {what} has ({most:,}): one carries "
                f"{three_digits(rate / worst)} of the {three_digits(rate)} tokens/s; "
                + _remedy(plan, math.ceil(worst))
            )


def _remedy(plan: Plan, parts: int) -> str:
    """What would carry the rest: clusters side by side, each with a part of the pool."""
    each = plan.pool.num_nodes // parts
    least = plan.search.least_nodes[plan.placement.strategy]
    if each >= least:
        return f"all take {parts:,} clusters of servers, each with {each:,} nodes of its own"
    return (
        f"all would take {parts:,} clusters of servers, and {each:,} nodes beside each hold no "
        f"copy of the model, which takes {least:,}"
    )


def _spares_needed(plan: Plan) -> str:
    """Spares of each slot for the usual target, and the nodes that they are."""
    needed = plan.failures.spares_for_target
    if needed is None:
        return "more than 10,000 spares of each slot keep the full rate for 99.9 % of the time"
    nodes = needed * sum(copies.slot.number for copies in plan.placement.copies)
    return (
        f"{needed} {'spare' if needed == 1 else 'spares'} of each slot, {nodes:,} nodes, keep the "
        "full rate for 99.9 % of the time"
    )


def servers_section(plan: Plan) -> Section:
    load = plan.load
    rows = [
        ("RabbitMQ", f"{scaled(load.messages_per_s)}messages/s",
         f"{human_bytes(load.message_bytes_per_s)}/s", f"{load.connections:,} connections",
         f"{load.broker_nodes:,} nodes"),
        ("Redis", f"{scaled(load.redis_operations_per_s)}operations/s",
         f"{human_bytes(load.redis_bytes_per_s)}/s", f"{human_bytes(load.redis_memory_bytes)}",
         f"{load.redis_shards:,} shards"),
    ]  # fmt: skip
    return Section(
        "Broker and Redis",
        ("server", "rate", "bytes", "holds", "needed"),
        tuple(rows),
        (f"one carries what `{plan.pool.servers.name}` says, to "
         f"{share(plan.pool.servers.max_utilisation)}",),
    )  # fmt: skip


def limits_section(plan: Plan) -> Section:
    rows = [
        (
            limit.what,
            f"{scaled(limit.used)}{limit.unit}",
            f"{scaled(limit.available)}{limit.unit}",
            times_full(limit.utilisation),
            "never" if limit.full_at_nodes == math.inf else human_count(limit.full_at_nodes),
        )
        for limit in plan.limits
        if limit.full_at_nodes < 1000 * plan.pool.num_nodes or limit.full_at_nodes == math.inf
    ]
    notes = []
    if plan.limits:
        first = plan.limits[0]
        notes.append(
            f"first to break: {first.what}, at the load of {human_count(first.full_at_nodes)} nodes"
        )
        notes += list(_too_much(plan))
    return Section(
        "What breaks first",
        ("shared by all", "used", "there is", "full", "full at nodes"),
        tuple(rows),
        tuple(notes),
    )
