"""Makes the world of a simulation from a plan. Knows both; decides nothing.

What the plan says of steps of one row and of many becomes a straight line. A stage's trunk slots
are one worker; its experts are nodes that all workers of the stage share.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from services.planner.cost import kv_bytes_per_token
from services.planner.load import Limit
from services.planner.network import units_of
from services.planner.specs import ExpertMlp, NodeCount, Pool
from services.planner.stages import Stage
from services.planner.timing import StageStep, Surroundings, stage_step
from services.simulator.world import (
    Domain,
    Experts,
    Failures,
    Group,
    Host,
    Network,
    Rules,
    Tier,
    WorkerSet,
    World,
)
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.planner.plan import Plan

MANY_ROWS = 32
SCHEDULER_REQUESTS = 256
# Of a cluster of 1,800 machines in its first year: 20 racks for 1 to 6 hours, one power unit with
# 500 to 1,000 machines for 6 hours, 3 routers for one hour (J. Dean, Designs, Lessons and Advice
# from Building Large Distributed Systems, LADIS 2009).
HOURS_A_YEAR = 8766.0
RACKS_A_YEAR, RACK_HOURS = 20 / (1800 / 40), 3.5
POWER_NODES, POWER_A_YEAR, POWER_HOURS = 750, 750 / 1800, 6.0
SWITCHES_A_YEAR, SWITCH_HOURS = 3.0, 1.0


def without_spares(pool: Pool, num_spares: int) -> Pool:
    """The pool that is planned for: without so many of its nodes, of each kind alike.

    Raises `ConfigError` when nothing would be left.
    """
    if not 0 <= num_spares < pool.num_nodes:
        raise ConfigError(
            f"--spares must leave nodes that work, of {pool.num_nodes:,} in the pool; "
            f"got {num_spares:,}"
        )
    left, nodes = num_spares, []
    for number, kind in enumerate(pool.nodes):
        before = sum(each.count for each in pool.nodes[number:])
        part = round(left * kind.count / before)
        left -= part
        if kind.count > part:
            nodes.append(NodeCount(kind.node, kind.count - part))
    return replace(pool, nodes=tuple(nodes))


def world_of(
    plan: Plan, pool: Pool, *, position: int, failures_per_hour: float | None = None
) -> World:
    """The plan's cluster, with what the pool has beyond it as spares, and its usual failures.

    Turns are those of tokens at `position`. `failures_per_hour` of a node replaces what its specs
    say.
    """
    # Packets are lost one by one there: their expected wait is not to be in each hop as well.
    network = replace(plan.pool.network, loss=0.0)
    around = Surroundings(network, plan.pool.servers, plan.question.wire)
    groups = tuple(
        _group(plan, around, index, position) for index in range(len(plan.placement.stages))
    )
    serving = sum(group.num_nodes for group in groups)
    return World(
        groups=groups,
        network=_network(plan),
        failures=_failures(pool, failures_per_hour),
        rules=Rules(max_in_flight=max(SCHEDULER_REQUESTS, round(plan.placement.streams))),
        host=_host(pool),
        num_spares=max(0, pool.num_nodes - serving),
        name=f"{plan.model.name} on {pool.name}",
    )


def _group(plan: Plan, around: Surroundings, index: int, context: int) -> Group:
    stage = plan.placement.stages[index]
    one = stage_step(plan.demand, around, stage, 1, context)
    many = stage_step(plan.demand, around, stage, MANY_ROWS, context)
    busy_s, row_s = _line(one.trunk_busy_s, many.trunk_busy_s)
    out_s, out_row_s = _line(
        one.latency.total - one.trunk_busy_s, many.latency.total - many.trunk_busy_s
    )
    trunk, expert = _copies_of(plan, index)
    layers = plan.model.layers[stage.first_layer : stage.end_layer]
    return Group(
        turn_s=busy_s,
        row_s=row_s,
        workers=(WorkerSet(trunk),),
        nodes_per_worker=stage.width,
        experts=_experts(plan, stage, one, expert),
        out_s=max(0.0, out_s),
        out_row_s=max(0.0, out_row_s),
        node_bytes=stage.weight_bytes,
        kv_row_bytes=sum(kv_bytes_per_token(layer) for layer in layers),
        messages=one.traffic.messages,
        moved_bytes=one.traffic.num_bytes,
    )


def _line(one: float, many: float) -> tuple[float, float]:
    """What a step takes, and each row of it."""
    row = max(0.0, (many - one) / (MANY_ROWS - 1))
    return max(0.0, one - row), row


def _copies_of(plan: Plan, index: int) -> tuple[int, int]:
    """How many nodes hold each trunk slot and each expert slot of a stage."""
    stages = plan.placement.stages
    stage = stages[index]
    trunk = expert = 0
    for copies in plan.placement.copies:
        slot, held = copies.slot, copies.active + copies.spares
        if slot.node != stage.node and slot.node != stage.expert_node:
            continue
        if slot.weight_bytes == stage.weight_bytes and slot.sequence_bytes == stage.sequence_bytes:
            trunk = max(trunk, held)
        elif stage.expert_slots and slot.weight_bytes == stage.expert_slot_bytes:
            expert = max(expert, held)
    assert trunk, "each stage has a slot in its plan"
    return trunk, expert


def _experts(plan: Plan, stage: Stage, one: StageStep, copies: int) -> Experts | None:
    if not stage.expert_slots:
        return None
    mlps = [layer.mlp for layer in plan.model.layers[stage.first_layer : stage.end_layer]]
    chosen = [mlp for mlp in mlps if isinstance(mlp, ExpertMlp)]
    missed = 1.0
    for mlp in chosen:
        share = mlp.num_experts_per_token / mlp.num_experts
        missed *= (1.0 - share) ** max(1.0, stage.experts_per_slot / len(chosen))
    return Experts(
        num_slots=stage.expert_slots,
        copies=max(1, copies),
        touched_share=1.0 - missed,
        row_s=one.expert_busy_s,
        node_bytes=stage.expert_slot_bytes,
    )


def _network(plan: Plan) -> Network:
    network, servers, load = plan.pool.network, plan.pool.servers, plan.load
    slowest = min(kind.node.network_bytes_per_s for kind in plan.pool.nodes)
    per_message = load.redis_operations_per_s / max(1e-9, load.messages_per_s)
    tiers = [
        Tier("broker, messages", load.broker_nodes * servers.broker_messages_per_s, 1.0, 0.0),
        Tier("broker, bytes", load.broker_nodes * servers.broker_bytes_per_s, 0.0, 1.0),
        Tier("Redis", load.redis_shards * servers.redis_operations_per_s, per_message, 0.0),
        *(_uplink(plan, limit) for limit in plan.limits if limit.what.startswith("uplinks")),
    ]
    return Network(
        node_bytes_per_s=slowest,
        loss=network.loss,
        retransmit_s=network.retransmit_s,
        tiers=tuple(tiers),
    )


def _uplink(plan: Plan, limit: Limit) -> Tier:
    share = limit.used / max(1e-9, plan.load.message_bytes_per_s)
    return Tier(limit.what, limit.available, 0.0, share)


def _failures(pool: Pool, failures_per_hour: float | None) -> Failures:
    nodes = pool.num_nodes
    rate = pool.failures_per_hour / nodes if failures_per_hour is None else failures_per_hour
    repair = sum(kind.count * kind.node.repair_hours for kind in pool.nodes) / nodes
    domains = []
    if pool.network.rack_size > 0:
        domains = [
            Domain(
                pool.network.tiers[0].name,
                pool.network.rack_size,
                RACKS_A_YEAR / HOURS_A_YEAR,
                RACK_HOURS * 3600,
            ),
            Domain("power feed", POWER_NODES, POWER_A_YEAR / HOURS_A_YEAR, POWER_HOURS * 3600),
        ]
        for number, tier in enumerate(pool.network.tiers[1:-1], start=1):
            size = units_of(pool.network, number)
            if math.isfinite(size):
                domains.append(
                    Domain(
                        f"{tier.name} switch", int(size), SWITCHES_A_YEAR / HOURS_A_YEAR,
                        SWITCH_HOURS * 3600,
                    )
                )  # fmt: skip
    return Failures(per_node_hour=rate, outage_s=repair * 3600, domains=tuple(domains))


def _host(pool: Pool) -> Host:
    for kind in pool.nodes:
        if kind.node.host_cores:
            return Host(kind.node.host_cores, kind.node.hop_cpu_s)
    return Host()
