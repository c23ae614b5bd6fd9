"""The workers of a cluster, what they have to do, and what others believe of them.

A worker's *clock* is a list that the hot loop unpacks: when the turn that comes last begins and
ends, how many rows it holds, what a turn and a row take, and the worker. A closed clock, of one
that is dead, wounded, flaky or leaves, says that it never ends: whoever meets it looks closer.

Nobody sends heartbeats here. When a worker stops it is known when it told of itself last, and so
from when on it is silent to others and gone from presence: both are computed then.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import Any

from services.simulator.world import Experts
from shared.liveness import HEARTBEAT_S, PEERS_REFRESH_S, PRESENCE_TTL_MS
from shared.quarantine import Quarantine
from shared.router import Peer, choose_worker
from shared.silence import SILENT_AFTER_S

INF = math.inf
Clock = list[Any]  # start_s, end_s, rows, turn_s, row_s, worker
UNKNOWN: Clock = [-INF, INF, 0, 0.0, 0.0, None]
# Of larger groups those with the fewest requests are looked at first, and more only if need be.
SHORTLIST = 4
NOTICED_S = 0.02  # until the broker gives on what a process held that died


class Worker:
    """One worker of a group. `num_missing` of its nodes are dead and not replaced yet,
    `num_wanted` of them have no successor on its way either; with one missing it is dead. Others
    find it silent from `silent_s` on and presence forgets it at `gone_s`; the broker gives on what
    it held at `noticed_s`. One that `is_watched` is always looked at closely."""

    __slots__ = (
        "_kept", "_peer", "clock", "died_s", "gone_s", "group", "index", "is_draining",
        "is_flaky", "is_watched", "noticed_s", "num_active", "num_missing", "num_nodes",
        "num_wanted", "quarantine", "resting_until_s", "serves_since_s", "silent_s", "worker_id",
    )  # fmt: skip

    def __init__(self, index: int, group: int, num_nodes: int, turn_s: float, row_s: float) -> None:
        self.index = index
        self.group = group
        self.num_nodes = num_nodes
        self.worker_id = f"{index:08d}"
        self.clock: Clock = [-INF, 0.0, 0, turn_s, row_s, self]
        self.num_active = 0
        self.num_missing = self.num_wanted = 0
        self.died_s = self.noticed_s = self.silent_s = self.gone_s = INF
        self.is_watched = False
        self.serves_since_s = -INF
        self.is_draining = self.is_flaky = False
        self.quarantine: Quarantine | None = None
        self.resting_until_s = -INF
        self._kept: tuple[float, float, int] | None = None
        self._peer: tuple[tuple[int, int, bool, bool], Peer] | None = None

    @property
    def is_closed(self) -> bool:
        return self._kept is not None

    @property
    def is_dead(self) -> bool:
        return self.died_s < INF

    def settle(self) -> None:
        """Close its clock if it is to be looked at closely, else open it."""
        if self.is_dead or self.is_draining or self.is_flaky or self.is_watched:
            if self._kept is None:
                clock = self.clock
                self._kept = (clock[0], clock[1], clock[2])
                clock[0], clock[1] = -INF, INF
        elif self._kept is not None:
            self.clock[:3] = self._kept
            self._kept = None

    def turn(self) -> tuple[float, float, int]:
        """Start, end and rows of its last turn, whether it is closed or not."""
        clock = self.clock
        return self._kept or (clock[0], clock[1], clock[2])

    def set_turn(self, start_s: float, end_s: float, num_rows: int) -> None:
        if self._kept is None:
            self.clock[:3] = start_s, end_s, num_rows
        else:
            self._kept = (start_s, end_s, num_rows)

    @property
    def turn_us(self) -> int:
        """What a turn of one row takes, as presence tells it."""
        turn_s: float = self.clock[3] + self.clock[4]
        return max(1, round(turn_s * 1e6))

    @property
    def free_s(self) -> float:
        return self.turn()[1]

    def is_serving(self, now_s: float) -> bool:
        return not self.is_draining and now_s >= self.resting_until_s

    def is_silent(self, now_s: float) -> bool:
        return now_s >= self.silent_s

    def stops(
        self, now_s: float, *, is_noticed: bool, broker_notice_s: float, phase: float
    ) -> None:
        """It died. `phase` in 0..1 says how long before it told of itself for the last time."""
        told_s = now_s - phase * HEARTBEAT_S
        self.died_s = now_s
        self.noticed_s = now_s + (NOTICED_S if is_noticed else broker_notice_s)
        self.silent_s = told_s + PEERS_REFRESH_S * phase + SILENT_AFTER_S
        self.gone_s = told_s + PRESENCE_TTL_MS / 1e3
        self.settle()

    def turns_flaky(self) -> None:
        """It fails some of its steps from now on; its quarantine counts them."""
        self.is_flaky = True
        self.quarantine = self.quarantine or Quarantine()
        self.settle()

    def returns(self, now_s: float) -> None:
        """It serves again, with nothing to do."""
        self.died_s = self.noticed_s = self.silent_s = self.gone_s = INF
        self.serves_since_s = now_s
        self.is_flaky = False
        self.settle()
        self.set_turn(-INF, now_s, 0)

    def peer(self, now_s: float) -> Peer:
        """As presence shows it."""
        start_s, _, num_rows = self.turn()
        num_pending = num_rows if start_s > now_s else 0
        key = (num_pending, self.num_active, self.is_serving(now_s), now_s >= self.silent_s)
        if self._peer is None or self._peer[0] != key:
            clock = self.clock
            turn_us = max(1, round((clock[3] + clock[4]) * 1e6))
            self._peer = (
                key,
                Peer(
                    self.worker_id, (self.group,), key[2], key[0], key[1], turn_us, is_silent=key[3]
                ),
            )
        return self._peer[1]


class ExpertCopies:
    """The nodes with a group's experts: which are dead, and who has noticed."""

    def __init__(self, spec: Experts, broker_notice_s: float) -> None:
        self.spec = spec
        self._notice_s = broker_notice_s
        self._live = [spec.copies] * spec.num_slots
        self._dead: dict[int, list[float]] = {}  # slot -> when its dead copies are known
        self._clear_s = 0.0

    @property
    def is_whole(self) -> bool:
        return not self._dead

    def dies(self, slot: int, now_s: float) -> float:
        """A copy of a slot is gone; the share of steps under way that it had."""
        self._live[slot] -= 1
        self._dead.setdefault(slot, []).append(now_s + SILENT_AFTER_S)
        return self.spec.touched_share / (self._live[slot] + 1)

    def fewest(self) -> int:
        """The slot that a new node takes."""
        return min(self._dead, key=lambda slot: (self._live[slot], slot), default=0)

    def joins(self, slot: int) -> None:
        self._live[slot] += 1
        dead = self._dead.get(slot, [])
        if len(dead) > 1:
            dead.pop(0)
        else:
            self._dead.pop(slot, None)

    def hit_share(self, now_s: float) -> float:
        """The share of rows that need a copy which is dead: of slots whose other copies live only
        until all know of it."""
        reached = 1.0
        for slot, known_s in self._dead.items():
            live, unknown = self._live[slot], sum(now_s < at_s for at_s in known_s)
            share = 1.0 if live == 0 else unknown / (live + unknown)
            reached *= 1.0 - self.spec.touched_share * share
        return 1.0 - reached

    def wait_s(self, now_s: float, num_rows: int) -> float:
        """Send so many rows through; how long one of them waits for the experts before."""
        if not self.spec.row_s:
            return 0.0
        took_s = num_rows * self.spec.row_s * self.spec.num_slots / max(1, sum(self._live))
        wait_s = max(0.0, self._clear_s - now_s)
        self._clear_s = max(self._clear_s, now_s) + took_s
        return wait_s


class Crowd:
    """The workers of one group, as its senders see them and as its queue does."""

    def __init__(self, group: int) -> None:
        self.group = group
        self.workers: list[Worker] = []
        self.num_up = 0
        self.min_turn_us = 1 << 62
        self.experts: ExpertCopies | None = None
        self._idlest: list[tuple[int, int, Worker]] = []

    def add(self, worker: Worker) -> None:
        self.workers.append(worker)
        self.num_up += 1
        self.min_turn_us = min(self.min_turn_us, worker.turn_us)
        if len(self.workers) > SHORTLIST and not self._idlest:
            self._idlest = [(w.num_active, w.index, w) for w in self.workers]
            heapq.heapify(self._idlest)
        elif self._idlest:
            heapq.heappush(self._idlest, (worker.num_active, worker.index, worker))

    def watch(self, *, is_watched: bool) -> None:
        """Look closely at all of its workers, or not any more."""
        for worker in self.workers:
            worker.is_watched = is_watched
            worker.settle()

    def counts(self, worker: Worker, change: int) -> None:
        """A request takes it on its route, or leaves it."""
        worker.num_active += change
        if self._idlest:
            heapq.heappush(self._idlest, (worker.num_active, worker.index, worker))
            if len(self._idlest) > 4 * len(self.workers) + 64:
                self._idlest = [(w.num_active, w.index, w) for w in self.workers]
                heapq.heapify(self._idlest)

    def choose(self, usual: Worker | None, shunned: Worker | None, now_s: float) -> Worker | None:
        """The worker that the senders' policy chooses, dead or alive; None if none is known."""
        routed = usual.worker_id if usual is not None else ""
        shun = shunned.worker_id if shunned is not None else ""
        usual_is_known = usual is not None and now_s < usual.gone_s
        for workers, least_active in self._widening():
            known = {w.worker_id: w for w in workers if now_s < w.gone_s}
            if usual is not None and usual_is_known:
                known[routed] = usual
            peers = [worker.peer(now_s) for worker in known.values()]
            chosen = choose_worker(self.group, routed, peers, shunned=shun)
            if least_active is None:
                return known.get(chosen)
            if not chosen or chosen == shun or known[chosen].is_silent(now_s):
                continue
            bound_us = (1 + least_active / 2) * self.min_turn_us
            if chosen == routed or known[chosen].peer(now_s).load_us <= bound_us:
                return known[chosen]
        return None

    def take(self, now_s: float, other_than: Worker | None = None) -> Worker | None:
        """The worker that takes a step from the group's queue: a live one that is free first."""
        best: Worker | None = None
        for worker in self.workers:
            if not worker.is_dead and worker.is_serving(now_s) and worker is not other_than:
                if worker.free_s <= now_s and worker.num_active == 0:
                    return worker
                if best is None or (max(worker.free_s, now_s), worker.num_active) < (
                    max(best.free_s, now_s), best.num_active,
                ):  # fmt: skip
                    best = worker
        if best is None and other_than is not None:
            return self.take(now_s)
        return best

    def _widening(self) -> Iterator[tuple[list[Worker], int | None]]:
        """Those with the fewest requests, more each time; with what the next has at least."""
        heap, limit = self._idlest, SHORTLIST
        while heap and limit < len(self.workers):
            found: list[tuple[int, int, Worker]] = []
            before: Worker | None = None
            while heap and len(found) < limit:
                entry = heapq.heappop(heap)
                worker = entry[2]
                if entry[0] == worker.num_active and worker is not before:  # of equals one
                    found.append(entry)
                    before = worker
            least = heap[0][0] if heap else 0
            for entry in found:
                heapq.heappush(heap, entry)
            yield [entry[2] for entry in found], least
            limit *= 8
        yield self.workers, None
