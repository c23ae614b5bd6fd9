"""What broker, Redis and switches must carry, and which of them is too small first. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.planner.cost import kv_bytes_per_token, model_bytes, sequence_bytes, state_bytes
from services.planner.network import tier_shares, units_of
from services.planner.placement import Placement
from services.planner.slices import Demand
from services.planner.specs import Pool

CONNECTIONS_A_WORKER = 2  # one to take, one to publish
HEARTBEATS_PER_S = 1.0
HEARTBEAT_BYTES = 500
EVENT_BYTES = 200  # of a token in its request's stream
SNAPSHOT_TOKENS = 64  # recurrent state is written so often, and replayed from there


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """Rates of the planned tokens, and the servers that carry them at their `max_utilisation`."""

    messages_per_token: float
    messages_per_s: float
    message_bytes_per_token: float
    message_bytes_per_s: float
    connections: int
    broker_nodes: int
    redis_operations_per_s: float
    redis_bytes_per_s: float
    redis_memory_bytes: int
    redis_shards: int


@dataclass(frozen=True, slots=True)
class Limit:
    """Something that all nodes share: how much of it is used, of how much, and the number of nodes
    of a pool like this one at which it is full; infinite for what grows with them."""

    what: str
    used: float
    available: float
    unit: str
    full_at_nodes: float

    @property
    def utilisation(self) -> float:
        return self.used / self.available


def server_load(demand: Demand, pool: Pool, placement: Placement) -> ServerLoad:
    """What the planned rate asks of the servers."""
    model, servers, rate = demand.model, pool.servers, placement.tokens_per_s
    workers = placement.num_nodes
    connections = CONNECTIONS_A_WORKER * workers
    messages = rate * placement.traffic.messages
    moved = rate * placement.traffic.num_bytes
    share = servers.max_utilisation
    broker_nodes = max(
        messages / servers.broker_messages_per_s / share,
        moved / servers.broker_bytes_per_s / share,
        connections / servers.broker_connections,
    )
    trunks = sum(stage.width for stage in placement.stages if stage.num_layers)
    # A token: its rows in each trunk slot, its commit, and its event read by whoever waits.
    operations = rate * (trunks + 2) + workers * HEARTBEATS_PER_S
    rows = sum(kv_bytes_per_token(layer) for layer in model.layers)
    states = sum(state_bytes(layer) for layer in model.layers) / SNAPSHOT_TOKENS
    written = rate * (rows + states + 2 * EVENT_BYTES) + workers * HEARTBEAT_BYTES
    sequences = sum(sequence_bytes(layer, demand.context) for layer in model.layers)
    memory = model_bytes(model, demand.bits) + placement.streams * sequences
    shards = max(
        operations / servers.redis_operations_per_s / share,
        written / servers.redis_bytes_per_s / share,
        memory / servers.redis_memory_bytes,
    )
    return ServerLoad(
        placement.traffic.messages, messages, placement.traffic.num_bytes, moved, connections,
        max(1, math.ceil(broker_nodes)), operations, written, math.ceil(memory),
        max(1, math.ceil(shards)),
    )  # fmt: skip


def limits(pool: Pool, placement: Placement, load: ServerLoad) -> list[Limit]:
    """Everything shared, what is full first at the front. Loads grow with the nodes."""
    servers, nodes = pool.servers, pool.num_nodes
    share = servers.max_utilisation
    found = []

    def add(
        what: str, used: float, available: float, unit: str, *, full_at: float | None = None
    ) -> None:
        if used > 0:
            at = nodes * available / used if full_at is None else full_at
            found.append(Limit(what, used, available, unit, at))

    for count in (1, servers.broker_max_nodes):
        name = "one RabbitMQ node" if count == 1 else f"a RabbitMQ cluster of {count}"
        rate = count * servers.broker_messages_per_s * share
        add(f"{name}, messages", load.messages_per_s, rate, "messages/s")
        rate = count * servers.broker_bytes_per_s * share
        add(f"{name}, bytes", load.message_bytes_per_s, rate, "B/s")
        most = count * servers.broker_connections
        add(f"{name}, connections", load.connections, most, "connections")
    for count in (1, servers.redis_max_shards):
        name = "one Redis" if count == 1 else f"a Redis Cluster of {count}"
        rate = count * servers.redis_operations_per_s * share
        add(f"{name}, operations", load.redis_operations_per_s, rate, "operations/s")
        rate = count * servers.redis_bytes_per_s * share
        add(f"{name}, bytes", load.redis_bytes_per_s, rate, "B/s")
        most = count * servers.redis_memory_bytes
        add(f"{name}, memory", load.redis_memory_bytes, most, "B")
    for what, used, available, size in _uplinks(pool, placement):
        # Each switch brings its uplinks and its nodes: they are full from the second one on, or
        # at no number of nodes.
        add(what, used, available, "B/s", full_at=size if used >= available else math.inf)
    return sorted(found, key=lambda limit: limit.full_at_nodes)


def _uplinks(pool: Pool, placement: Placement) -> list[tuple[str, float, float, float]]:
    """Bytes a second that leave the switches of each tier, of all of them together, what these
    carry, and the nodes under one of them."""
    network = pool.network
    crossing = [0.0] * len(network.tiers)
    for stage, step in zip(placement.stages, placement.steps, strict=True):
        rate = placement.tokens_per_s * step.traffic.num_bytes / step.batch
        inside = 0.0
        for tier, part in enumerate(tier_shares(network, max(2, stage.num_slots))):
            inside += part
            crossing[tier] += rate * max(0.0, 1.0 - inside)
    found = []
    for tier, spec in enumerate(network.tiers[:-1]):
        switches = math.ceil(pool.num_nodes / units_of(network, tier))
        capacity = switches * spec.uplink_bytes_per_s
        name = f"uplinks of all {switches:,} {spec.name} switches"
        found.append((name, crossing[tier], capacity, units_of(network, tier)))
    return found
