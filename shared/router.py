"""Chooses the worker that a step of a layer group is meant for. Pure: values in, an id out.

The worker that computed the group for this request before has its KV rows at hand, so it is kept
while it lives and is not overloaded. Otherwise the one that will be done first is taken: by the
turns that wait there, and how long its turns take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shared.store.presence_types import WorkerInfo, WorkerState

# Moving costs a read of the KV rows, and a figure is up to a second old: only what is clearly
# slower is left, and nothing is as long as it answers within the time of some hops.
OVERLOAD_RATIO = 4.0
OVERLOAD_MIN_US = 20_000
DEFAULT_TURN_US = 5_000  # of a worker that has not had a turn yet


@dataclass(frozen=True, slots=True)
class Peer:
    """A worker of presence as the router sees it: `num_assigned` steps went there since it told.

    One that `is_silent` may be dead: presence shows it for some seconds more.
    """

    worker_id: str
    groups: tuple[int, ...]
    is_serving: bool = True
    num_pending: int = 0
    num_active: int = 0
    turn_us: int = 0
    num_assigned: int = 0
    is_silent: bool = False

    @classmethod
    def of(cls, info: WorkerInfo, *, is_silent: bool = False) -> Peer:
        return cls(
            info.worker_id,
            info.groups,
            info.state is WorkerState.SERVING,
            info.num_pending,
            info.num_active,
            info.turn_us,
            is_silent=is_silent,
        )

    def can_take(self, group: int) -> bool:
        """Whether it serves the group, and takes new steps."""
        return self.is_serving and group in self.groups

    def assigned(self) -> Peer:
        """The same with one step more on its way."""
        return replace(self, num_assigned=self.num_assigned + 1)

    @property
    def wait_us(self) -> float:
        """What the steps that wait there take, this one included."""
        return (1 + self.num_pending) * (self.turn_us or DEFAULT_TURN_US)

    @property
    def load_us(self) -> float:
        """The same for a request that stays: those that are there come back now and then."""
        num_waiting = 1 + self.num_pending + (self.num_active + self.num_assigned) / 2
        return num_waiting * (self.turn_us or DEFAULT_TURN_US)


def choose_worker(
    group: int,
    routed: str,
    peers: Sequence[Peer],
    *,
    shunned: str = "",
    is_bound: bool = False,
) -> str:
    """The worker for a step of `group`; "" when none is known, and any of the group may take it.

    `routed` is the worker that had this request before, or "". `shunned` had it when it came to a
    stop: it may be frozen, and is taken only if nobody else is there, as those are that are silent.
    `is_bound` keeps to `routed` while it is there, however loaded.
    """
    able = [peer for peer in peers if peer.can_take(group)]
    able = [peer for peer in able if peer.worker_id != shunned] or able
    if is_bound and any(peer.worker_id == routed for peer in able):
        return routed
    able = [peer for peer in able if not peer.is_silent] or able
    if not able:
        return ""
    usual = next((peer for peer in able if peer.worker_id == routed), None)
    if usual is not None:
        soonest_us = min(peer.wait_us for peer in able)
        if usual.wait_us <= max(OVERLOAD_MIN_US, OVERLOAD_RATIO * soonest_us):
            return usual.worker_id
    return min(able, key=lambda peer: (peer.load_us, peer.worker_id)).worker_id


def with_worker(route: Sequence[str], group: int, worker_id: str) -> tuple[str, ...]:
    """The route with the worker of one group set."""
    padded = [*route, *[""] * (group + 1 - len(route))]
    padded[group] = worker_id
    return tuple(padded)


def worker_of(route: Sequence[str], group: int) -> str:
    """The worker of a group in a route, "" if none is known."""
    return route[group] if group < len(route) else ""
