"""What dies, when, and who takes its place. Knows no request.

Failures of a pool of n nodes that each fail at rate r are one stream of rate n * r, whose victim is
any of them; a victim that is dead already is drawn in vain, which is the same as not drawing it.
So a hundred thousand nodes cost as much as they fail, and nobody's clock is kept.

Nodes are numbered replica by replica, so that neighbours serve neighbouring groups: a rack that
fails takes some groups' worker of one replica each, not all workers of one group.

Longer than other modules: what breaks and what takes its place change the same few arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from services.simulator.agenda import Agenda
from services.simulator.draws import Block
from services.simulator.figures import Figures
from services.simulator.workers import Crowd, Worker
from services.simulator.world import Domain, Kill, Resize, World
from shared.liveness import ADOPT_AFTER_S, HEARTBEAT_S, PRESENCE_TTL_MS, least_covered

NOBODY = -1
FIRST_EXPERT = -2  # an expert node of group g is -2 - g


class Breakdowns:
    """All nodes. `died` hears of a worker that is dead, `served` of one that is whole again,
    `uncovered` of a group's last, `experts_died` of an expert node and of its share of steps."""

    def __init__(
        self,
        world: World,
        crowds: list[Crowd],
        agenda: Agenda,
        figures: Figures,
        draws: Block,
        *,
        new_worker: Callable[[int], Worker],
    ) -> None:
        self.died: Callable[[Worker], None]
        self.experts_died: Callable[[Crowd, float], None]
        self.served: Callable[[Worker], None]
        self.uncovered: Callable[[int], None]
        self.start_process: Callable[[float, Callable[[], None]], None] | None = None
        self._world = world
        self._failures = world.failures
        self._crowds = crowds
        self._agenda = agenda
        self._figures = figures
        self._draws = draws
        self._new_worker = new_worker
        self._workers: list[Worker] = []
        self._worker_of = np.empty(0, np.int32)
        self._slots = np.empty(0, np.int32)  # of expert nodes
        self._is_dead = np.empty(0, np.bool_)
        self._epoch_of = np.empty(0, np.int32)  # outdates what a node was about to do
        self._joining: dict[int, Worker | int] = {}
        self._lacking: list[dict[int, Worker]] = [{} for _ in crowds]
        self._experts_wanted: dict[int, int] = {}  # by group
        self._spares: deque[int] = deque()
        self.num_dead = 0

    @property
    def num_spares(self) -> int:
        return len(self._spares)

    @property
    def num_nodes(self) -> int:
        return len(self._worker_of)

    def open(self) -> None:
        """Number the nodes, and plan what will break."""
        sizes = [group.nodes_per_worker for group in self._world.groups]
        self._workers = sorted(
            (worker for crowd in self._crowds for worker in crowd.workers),
            key=lambda worker: worker.index,
        )
        counts = np.array([sizes[worker.group] for worker in self._workers])
        serving = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        experts = [crowd.experts.spec.num_nodes if crowd.experts else 0 for crowd in self._crowds]
        groups = np.repeat(np.arange(len(experts), dtype=np.int32), experts)
        serving = np.concatenate([serving, FIRST_EXPERT - groups])
        self._slots = np.concatenate(
            [np.zeros(int(counts.sum()), np.int32), *map(_slots, self._crowds)]
        )
        spare = np.full(self._world.num_spares, NOBODY, np.int32)
        self._worker_of = np.concatenate([serving, spare])
        self._slots = np.concatenate([self._slots, np.zeros(len(spare), np.int32)])
        self._is_dead = np.zeros(len(self._worker_of), np.bool_)
        self._epoch_of = np.zeros(len(self._worker_of), np.int32)
        self._spares.extend(range(len(serving), len(self._worker_of)))
        rates = self._failures
        for rate, call in (
            (rates.per_node_hour, self._power_fails),
            (rates.crashes_per_node_hour, self._process_dies),
            (rates.flaky_per_node_hour, self._turns_flaky),
        ):
            if rate > 0.0:
                self._plan(self.num_nodes * rate, call, rate)
        for domain in rates.domains:
            number = -(-self.num_nodes // domain.num_nodes)
            if domain.per_hour > 0.0:
                self._plan(number * domain.per_hour, self._domain_fails, domain)
        for kill in rates.kills:
            self._agenda.at(kill.at_s, self._kill, kill)
        for resize in self._world.resizes:
            self._agenda.at(resize.at_s, self._resize, resize)

    def crash(self, worker: Worker, _: int = 0) -> None:
        """The process of a worker dies, and starts again."""
        if not worker.is_dead:
            nodes = np.flatnonzero(self._worker_of == worker.index)
            self._process_of(int(nodes[0]))

    def _plan(self, per_hour: float, call: Callable[[object, int], None], item: object) -> None:
        gap_s = 3600.0 / per_hour * -float(np.log1p(-self._draws.one()))
        self._agenda.at(self._agenda.now_s + gap_s, call, item)

    def _any_node(self) -> int:
        return min(int(self._draws.one() * self.num_nodes), self.num_nodes - 1)

    def _power_fails(self, rate: object, _: int) -> None:
        assert isinstance(rate, float)
        node = self._any_node()
        if not self._is_dead[node]:
            self._figures.num_node_failures += 1
            self._node_dies(node, is_noticed=False, back_s=self._failures.outage_s)
        self._plan(self.num_nodes * rate, self._power_fails, rate)

    def _process_dies(self, rate: object, _: int) -> None:
        assert isinstance(rate, float)
        node = self._any_node()
        if not self._is_dead[node]:
            self._process_of(node)
        self._plan(self.num_nodes * rate, self._process_dies, rate)

    def _process_of(self, node: int) -> None:
        self._figures.num_process_deaths += 1
        self._node_dies(node, is_noticed=True, back_s=self._failures.restart_s)

    def _turns_flaky(self, rate: object, _: int) -> None:
        assert isinstance(rate, float)
        node = self._any_node()
        index = int(self._worker_of[node])
        if index >= 0 and not self._is_dead[node]:
            self._workers[index].turns_flaky()
        self._plan(self.num_nodes * rate, self._turns_flaky, rate)

    def _domain_fails(self, domain: object, _: int) -> None:
        assert isinstance(domain, Domain)
        number = -(-self.num_nodes // domain.num_nodes)
        first = min(int(self._draws.one() * number), number - 1) * domain.num_nodes
        self._figures.outages[domain.name] = self._figures.outages.get(domain.name, 0) + 1
        for node in range(first, min(first + domain.num_nodes, self.num_nodes)):
            if not self._is_dead[node]:
                self._figures.num_node_failures += 1
                self._node_dies(node, is_noticed=False, back_s=domain.outage_s)
        self._plan(number * domain.per_hour, self._domain_fails, domain)

    def _kill(self, kill: Kill, _: int) -> None:
        """As `cellpipe chaos` picks its victims: never the last that is ready of a group."""
        now_s, ready_s = self._agenda.now_s, self._failures.ready_s
        up = [worker for worker in self._workers if not worker.is_dead]
        ready = [w for w in up if now_s - w.serves_since_s > ready_s]
        victims = [w for w in up if any(r.group == w.group and r is not w for r in ready)]
        if victims:
            self.crash(victims[min(int(kill.draw * len(victims)), len(victims) - 1)])

    def _node_dies(self, node: int, *, is_noticed: bool, back_s: float) -> None:
        self._is_dead[node] = True
        self.num_dead += 1
        self._epoch_of[node] += 1
        self._agenda.at(self._agenda.now_s + back_s, self._node_returns, node)
        index = int(self._worker_of[node])
        if index == NOBODY:
            return  # a spare: it is left out when one is needed
        self._worker_of[node] = NOBODY
        is_joining = self._joining.pop(node, None) is not None
        if index <= FIRST_EXPERT:
            self._expert_dies(node, FIRST_EXPERT - index, is_joining=is_joining)
        else:
            worker = self._workers[index]
            worker.num_wanted += 1
            self._lacking[worker.group][worker.index] = worker
            if not is_joining:
                worker.num_missing += 1
                self._worker_dies(worker, is_noticed=is_noticed)
        if self._spares:
            told_s = self._agenda.now_s - HEARTBEAT_S * self._draws.one()
            self._agenda.at(told_s + PRESENCE_TTL_MS / 1e3 + ADOPT_AFTER_S, self._adopt)

    def _expert_dies(self, node: int, group: int, *, is_joining: bool) -> None:
        self._experts_wanted[group] = self._experts_wanted.get(group, 0) + 1
        crowd = self._crowds[group]
        assert crowd.experts is not None, "it had an expert node"
        if not is_joining:
            share = crowd.experts.dies(int(self._slots[node]), self._agenda.now_s)
            crowd.watch(is_watched=True)
            self.experts_died(crowd, share)

    def _worker_dies(self, worker: Worker, *, is_noticed: bool) -> None:
        if worker.is_dead:
            return
        notice_s = self._world.rules.broker_notice_s
        worker.stops(
            self._agenda.now_s,
            is_noticed=is_noticed,
            broker_notice_s=notice_s,
            phase=self._draws.one(),
        )
        crowd = self._crowds[worker.group]
        if not worker.is_draining:
            crowd.num_up -= 1
            if crowd.num_up == 0:
                self.uncovered(worker.group)
        self.died(worker)

    def _node_returns(self, node: int, _: int) -> None:
        self._is_dead[node] = False
        self.num_dead -= 1
        self._spares.append(node)
        self._adopt(None, 0)

    def _adopt(self, _: None, __: int) -> None:
        """Nodes without work take the places that are free, in the least covered groups first."""
        while self._spares and (any(self._lacking) or self._experts_wanted):
            node = self._spares.popleft()
            if self._is_dead[node] or self._worker_of[node] != NOBODY:
                continue
            if self._experts_wanted:  # a slot may have no copy at all
                self._join_experts(node, min(self._experts_wanted))
                continue
            coverage = [crowd.num_up for crowd in self._crowds]
            group = least_covered(coverage, [bool(lacking) for lacking in self._lacking])
            assert group is not None, "one of them lacks a node"
            self._join(node, min(self._lacking[group].values(), key=_fewest_missing))

    def _join_experts(self, node: int, group: int) -> None:
        self._experts_wanted[group] -= 1
        if not self._experts_wanted[group]:
            del self._experts_wanted[group]
        experts = self._crowds[group].experts
        assert experts is not None, "it lacks an expert node"
        self._worker_of[node] = FIRST_EXPERT - group
        self._slots[node] = experts.fewest()
        self._joining[node] = group
        self._load(node, experts.spec.node_bytes)

    def _join(self, node: int, worker: Worker) -> None:
        worker.num_wanted -= 1
        if worker.num_wanted == 0:
            del self._lacking[worker.group][worker.index]
        self._worker_of[node] = worker.index
        self._joining[node] = worker
        self._load(node, self._world.groups[worker.group].node_bytes)

    def _load(self, node: int, num_bytes: float) -> None:
        load_s = num_bytes / self._world.network.node_bytes_per_s
        at_s, epoch = self._agenda.now_s + load_s, int(self._epoch_of[node])
        if self.start_process is None:
            self._agenda.at(at_s, self._joined, node, epoch)
        else:
            self.start_process(self._failures.start_cpu_s, lambda: self._joined(node, epoch))

    def _joined(self, node: int, epoch: int) -> None:
        if self._epoch_of[node] != epoch or node not in self._joining:
            return
        joined = self._joining.pop(node)
        self._figures.num_replaced += 1
        if isinstance(joined, int):
            crowd = self._crowds[joined]
            assert crowd.experts is not None, "it has joined its experts"
            crowd.experts.joins(int(self._slots[node]))
            if crowd.experts.is_whole:
                crowd.watch(is_watched=False)
            return
        joined.num_missing -= 1
        if not joined.num_missing:
            self._crowds[joined.group].num_up += 1
            joined.returns(self._agenda.now_s)
            self.served(joined)

    def _resize(self, resize: Resize, _: int) -> None:
        if resize.num_nodes > 0:
            self._grow(resize.num_nodes)
        else:
            self._shrink(-resize.num_nodes)

    def _grow(self, num_nodes: int) -> None:
        """New nodes fill the gaps; the others become workers of the least covered groups."""
        first = self.num_nodes
        self._worker_of = np.concatenate([self._worker_of, np.full(num_nodes, NOBODY, np.int32)])
        self._is_dead = np.concatenate([self._is_dead, np.zeros(num_nodes, np.bool_)])
        self._slots = np.concatenate([self._slots, np.zeros(num_nodes, np.int32)])
        self._epoch_of = np.concatenate([self._epoch_of, np.zeros(num_nodes, np.int32)])
        left = num_nodes - sum(self._experts_wanted.values())
        left -= sum(worker.num_wanted for lacking in self._lacking for worker in lacking.values())
        coverage = [len(crowd.workers) for crowd in self._crowds]
        sizes = [group.nodes_per_worker for group in self._world.groups]
        while (group := least_covered(coverage, [size <= left for size in sizes])) is not None:
            left -= sizes[group]
            coverage[group] += 1
            worker = self._new_worker(group)
            self._workers.append(worker)
            worker.num_missing = worker.num_wanted = sizes[group]
            now_s = self._agenda.now_s
            worker.stops(now_s, is_noticed=True, broker_notice_s=0.0, phase=0.0)
            worker.silent_s = worker.gone_s = now_s  # nobody has heard of it yet
            self._crowds[group].num_up -= 1
            self._lacking[group][worker.index] = worker
        self._spares.extend(range(first, first + num_nodes))
        self._adopt(None, 0)

    def _shrink(self, num_nodes: int) -> None:
        """Spares go first, then workers of the best covered groups: they finish what they have."""
        while num_nodes > 0 and self._spares:
            self._spares.pop()
            num_nodes -= 1
        while num_nodes > 0:
            crowd = max(self._crowds, key=lambda crowd: (crowd.num_up, -crowd.group))
            up = [w for w in crowd.workers if not w.is_dead and not w.is_draining]
            if crowd.num_up < 2 or len(up) < 2:
                return  # the last of each group stays
            worker = max(up, key=lambda worker: worker.index)
            worker.is_draining = True
            worker.settle()
            crowd.num_up -= 1
            num_nodes -= worker.num_nodes


def _fewest_missing(worker: Worker) -> tuple[int, int]:
    return worker.num_missing, worker.index


def _slots(crowd: Crowd) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The slots of a group's expert nodes, copy by copy: neighbours hold different ones."""
    if crowd.experts is None:
        return np.empty(0, np.int32)
    spec = crowd.experts.spec
    return np.tile(np.arange(spec.num_slots, dtype=np.int32), spec.copies)
