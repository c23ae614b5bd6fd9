"""What is simulated, as values: groups, workers, network, servers, failures, policy. No clock.

G layer groups. Seconds, bytes, and rates an hour where the name says so. A *worker* serves one
group; it is one node, or several that compute a group together (tensor or expert parallel). Nodes
that serve nothing are spares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from shared.errors import ConfigError
from shared.policy import RedriveLimits
from shared.topology import INBOX_TTL_MS, MAX_QUEUED_REQUESTS


@dataclass(frozen=True, slots=True)
class WorkerSet:
    """`count` workers of one kind, `slowness` times as slow as the group's figures say."""

    count: int
    slowness: float = 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """Nodes of a group that hold routed experts: `copies` of each of `num_slots` slots.

    A row needs a given slot with probability `touched_share`, and occupies each of them for `row_s`
    on average. A node loads `node_bytes` before it serves.
    """

    num_slots: int
    copies: int
    touched_share: float
    row_s: float = 0.0
    node_bytes: float = 0.0

    @property
    def num_nodes(self) -> int:
        return self.num_slots * self.copies


@dataclass(frozen=True, slots=True)
class Group:
    """One layer group and its workers.

    A turn over n rows takes `turn_s + n * row_s`, and after it n rows need `out_s + n * out_row_s`
    more until the next group has them, wait left out. A worker is `nodes_per_worker` nodes, each of
    which loads `node_bytes` before it serves. `wire_bytes` is what one row is on its way to this
    group, `kv_row_bytes` what it leaves in the store; `messages` and `moved_bytes` are what a row
    costs all that is shared.
    """

    turn_s: float
    row_s: float
    workers: tuple[WorkerSet, ...]
    nodes_per_worker: int = 1
    experts: Experts | None = None
    out_s: float = 0.0
    out_row_s: float = 0.0
    node_bytes: float = 0.0
    wire_bytes: float = 0.0
    kv_row_bytes: float = 0.0
    messages: float = 1.0
    moved_bytes: float = 0.0

    @property
    def num_nodes(self) -> int:
        """Nodes that compute it, or hold its experts."""
        experts = self.experts.num_nodes if self.experts is not None else 0
        return self.num_workers * self.nodes_per_worker + experts

    @property
    def num_workers(self) -> int:
        return sum(kind.count for kind in self.workers)


@dataclass(frozen=True, slots=True)
class Tier:
    """Something that all share: a level of switches, the broker cluster, Redis.

    It carries `units_per_s` in all; what comes faster waits its turn. `units_per_message` and
    `units_per_byte` say what a hop takes of it. `math.inf` is no bound.
    """

    name: str
    units_per_s: float
    units_per_message: float = 0.0
    units_per_byte: float = 1.0


@dataclass(frozen=True, slots=True)
class Network:
    """`hop_s` is one hop without its bytes: worker, broker, worker. Of the packets `loss` are lost
    and sent again `retransmit_s` later. `node_bytes_per_s` is one node's link."""

    hop_s: float = 0.0
    node_bytes_per_s: float = math.inf
    loss: float = 0.0
    retransmit_s: float = 0.2
    tiers: tuple[Tier, ...] = ()


@dataclass(frozen=True, slots=True)
class Domain:
    """What fails together: each run of `num_nodes` neighbours, `per_hour` times each."""

    name: str
    num_nodes: int
    per_hour: float
    outage_s: float


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that is killed at a given time; `draw` in 0..1 picks its victim."""

    at_s: float
    draw: float


@dataclass(frozen=True, slots=True)
class Failures:
    """`per_node_hour` nodes lose power, without a word, for `outage_s`; of all of them `domains`
    strike neighbours at once. `crashes_per_node_hour` are processes that die, which the broker
    hears at once, and start again within `restart_s`, taking `start_cpu_s` of their host's cores.
    `kills` are such deaths at given times; the last worker of a group is spared, as is one that has
    served for less than `ready_s`. A node becomes flaky `flaky_per_node_hour` times: it then fails
    `flaky_share` of its steps. `crash_share` of all steps end the process that computes them.
    """

    per_node_hour: float = 0.0
    outage_s: float = 4 * 3600.0
    crashes_per_node_hour: float = 0.0
    restart_s: float = 3.0
    start_cpu_s: float = 0.0
    ready_s: float = 0.0
    domains: tuple[Domain, ...] = ()
    kills: tuple[Kill, ...] = ()
    flaky_per_node_hour: float = 0.0
    flaky_share: float = 0.5
    crash_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Resize:
    """At `at_s` so many nodes join, or are drained (negative)."""

    at_s: float
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Host:
    """One machine whose processes share `cores`; each hop takes `hop_cpu_s` of them beside the
    turn. 0 cores: each node is a machine of its own."""

    cores: int = 0
    hop_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits under which cellpipe's policy decides.

    `is_sticky` False lets any worker of a group take any step, as from one queue.
    `broker_notice_s` is until the broker misses a peer that vanished without a word: three
    heartbeats. `max_in_flight` None is no bound.
    """

    is_sticky: bool = True
    inbox_ttl_s: float = INBOX_TTL_MS / 1e3
    broker_notice_s: float = 30.0
    redrive: RedriveLimits = RedriveLimits()
    max_attempts: int = 3
    max_batch_rows: int = 128
    max_slice_rows: int = 128
    max_in_flight: int | None = 256
    max_queued: int = MAX_QUEUED_REQUESTS
    kv_budget_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class World:
    """All of it. `variation` is the coefficient of variation of a turn's time: 0 always the same,
    1 exponential. `num_spares` nodes serve nothing until one that serves is lost."""

    groups: tuple[Group, ...]
    network: Network = Network()
    failures: Failures = Failures()
    rules: Rules = Rules()
    host: Host = Host()
    num_spares: int = 0
    resizes: tuple[Resize, ...] = ()
    variation: float = 0.1
    name: str = field(default="", compare=False)

    @property
    def num_nodes(self) -> int:
        """Nodes that serve, and spares."""
        return sum(group.num_nodes for group in self.groups) + self.num_spares


def check_world(world: World) -> World:
    """The world itself. Raises `ConfigError` naming the field and the value that cannot be."""
    if not world.groups:
        raise ConfigError("a simulated cluster needs at least one layer group, got none")
    for number, group in enumerate(world.groups):
        _check_numbers(f"groups[{number}].", group)
        if group.num_workers < 1:
            raise ConfigError(f"groups[{number}].workers must be some, got {group.num_workers}")
        if group.nodes_per_worker < 1:
            raise ConfigError(
                f"groups[{number}].nodes_per_worker must be at least 1, "
                f"got {group.nodes_per_worker}"
            )
        if group.turn_s + group.row_s <= 0.0:
            raise ConfigError(f"groups[{number}].turn_s: a turn must take time, got {group.turn_s}")
        for kind in group.workers:
            if kind.count < 0 or not 0.0 < kind.slowness < math.inf:
                raise ConfigError(f"groups[{number}].workers: {kind} cannot be")
        if group.experts is not None:
            _check_numbers(f"groups[{number}].experts.", group.experts)
            if group.experts.num_nodes < 1 or not group.experts.touched_share <= 1.0:
                raise ConfigError(f"groups[{number}].experts: {group.experts} cannot be")
    _check_numbers("network.", world.network)
    _check_numbers("failures.", world.failures)
    for name in ("flaky_share", "crash_share"):
        if not 0.0 <= (share := getattr(world.failures, name)) <= 1.0:
            raise ConfigError(f"failures.{name} must be in 0..1, got {share}")
    if not 0.0 <= world.network.loss < 1.0:
        raise ConfigError(f"network.loss must be in 0..1, got {world.network.loss}")
    for tier in world.network.tiers:
        if not tier.units_per_s > 0.0:
            raise ConfigError(f"network tier {tier.name}: units_per_s is {tier.units_per_s}")
    for domain in world.failures.domains:
        if domain.num_nodes < 1 or not domain.per_hour >= 0.0 or not domain.outage_s >= 0.0:
            raise ConfigError(f"failures.domains: {domain} cannot be")
    if world.num_spares < 0:
        raise ConfigError(f"num_spares must not be negative, got {world.num_spares}")
    if not 0.0 <= world.variation <= 5.0:
        raise ConfigError(f"variation must be in 0..5, got {world.variation}")
    return world


def _check_numbers(prefix: str, value: object) -> None:
    for item in fields(value):  # type: ignore[arg-type]
        number = getattr(value, item.name)
        if isinstance(number, float) and not number >= 0.0:
            raise ConfigError(f"{prefix}{item.name} must be a number from 0 on, got {number}")
