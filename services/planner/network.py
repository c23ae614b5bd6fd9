"""How long a message takes, and which switches it passes. Pure.

A message goes from its sender to a broker and from there to its receiver. The broker of a queue is
taken to stand in the rack of those who take from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from services.planner.specs import NetworkSpec, ServerSpec

PACKET_BYTES = 1448  # of a TCP segment in an Ethernet frame of 1500


@dataclass(frozen=True, slots=True)
class Link:
    """Everything about messages between two of `neighbours` nodes that are placed side by side."""

    network: NetworkSpec
    servers: ServerSpec
    node_bytes_per_s: float
    neighbours: int

    def message_s(self, num_bytes: float) -> float:
        """Seconds of one message from a worker's hand to the next one's."""
        return _message_s(self, num_bytes)

    def send_s(self, num_bytes: float) -> float:
        """Seconds that so many bytes occupy a node's own wire."""
        return num_bytes / self.node_bytes_per_s


@cache
def _message_s(link: Link, num_bytes: float) -> float:
    network = link.network
    near_s = network.tiers[0].latency_s
    far_s = mean_latency_s(network, link.neighbours)
    packets = math.ceil(num_bytes / PACKET_BYTES)
    lost = 1.0 - (1.0 - network.loss) ** (2 * packets)
    wires_s = 2 * num_bytes / link.node_bytes_per_s
    return far_s + near_s + wires_s + link.servers.broker_hop_s + lost * network.retransmit_s


def units_of(network: NetworkSpec, tier: int) -> float:
    """Nodes below one switch of a tier; infinite for the last."""
    size = 1.0
    for each in network.tiers[: tier + 1]:
        size *= each.size or math.inf
    return size


def tier_shares(network: NetworkSpec, neighbours: int) -> tuple[float, ...]:
    """For each tier, the share of messages that meet there, between two of so many nodes side by
    side: those of a rack fill it before the next one is begun."""
    shares = []
    before = 0.0
    for tier in range(len(network.tiers)):
        below = units_of(network, tier)
        inside = 1.0 if neighbours <= below else max(0.0, (below - 1) / (neighbours - 1))
        shares.append(max(0.0, inside - before))
        before = max(before, inside)
    return tuple(shares)


def mean_latency_s(network: NetworkSpec, neighbours: int) -> float:
    """One way between two of so many nodes side by side."""
    shares = tier_shares(network, neighbours)
    return sum(s * tier.latency_s for s, tier in zip(shares, network.tiers, strict=True))


def hops_s(num_hops: int, hop_s: float) -> float:
    """The article's sum: so many hops one after the other."""
    return num_hops * hop_s
