"""Wires a world and a load into one run, and says how it ended.

Longer than other modules: it is the one place that knows all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.simulator.admission import Admission
from services.simulator.agenda import Agenda
from services.simulator.breakdowns import Breakdowns
from services.simulator.draws import Block, streams, turn_factors
from services.simulator.figures import NUM_BUCKETS, Figures, Moment
from services.simulator.load import Load
from services.simulator.passage import Passage
from services.simulator.recovery import Recovery
from services.simulator.requests import Pass, Request
from services.simulator.turns import Turns
from services.simulator.workers import UNKNOWN, Crowd, ExpertCopies, Worker
from services.simulator.world import World, check_world

MAX_EXACT = 1_000_000  # stops; more are computed in windows
DRAIN_S = 4 * 3600.0  # what still runs at the end is followed for so long
SHOW_EVERY = 4096


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is."""

    now_s: float
    horizon_s: float
    num_arrived: int
    num_requests: int
    num_ended: int
    num_running: int


@dataclass(slots=True)
class Outcome:
    """A run that is over. `lost` are accepted requests that nothing would ever end, `unfinished`
    those that still ran when the simulator stopped to look."""

    world: World
    figures: Figures
    lost: int
    unfinished: int
    num_workers: int
    num_nodes: int
    num_events: int
    is_exact: bool
    tier_utilisation: dict[str, float]
    tier_longest_waits_s: dict[str, float]

    @property
    def utilisation(self) -> float:
        """The share of their time that workers compute, over the whole run."""
        return self.figures.busy_total_s / (self.figures.ended_s * self.num_workers)


def num_visits(load: Load, world: World) -> int:
    """About how often a pass will come to a group."""
    passes = sum(math.ceil(asked.num_prompt / 32) + asked.num_tokens for asked in load.asked)
    return passes * len(world.groups)


def window_s(world: World) -> float:
    """A time in which no pass comes round: half of the shortest way through all groups."""
    fastest = sum(
        (group.turn_s + group.row_s) * min(kind.slowness for kind in group.workers)
        + world.network.hop_s
        + group.out_s
        for group in world.groups
    )
    return fastest / 2


class Simulation:
    """One run of `horizon_s` seconds, from one seed.

    `is_exact` has an event for each stop of a pass, False windows (`passage`); None chooses by how
    many there will be.
    """

    def __init__(
        self,
        world: World,
        load: Load,
        *,
        horizon_s: float,
        seed: int = 0,
        is_exact: bool | None = None,
        show: Callable[[Progress], None] | None = None,
    ) -> None:
        self._world = check_world(world)
        self._load = load
        self._horizon_s = horizon_s
        self._show = show
        if is_exact is None:
            is_exact = num_visits(load, world) <= MAX_EXACT
        self._is_exact = is_exact or world.host.cores > 0 or not world.rules.is_sticky
        self._window_s = window_s(world)
        rngs = streams(seed)
        factors = turn_factors(rngs["turns"], world.variation)
        choices = Block(rngs["choices"].random)
        self._agenda = Agenda()
        self.figures = Figures(horizon_s)
        self._running: dict[int, Request] = {}
        self._crowds = [Crowd(group) for group in range(len(world.groups))]
        for crowd, group in zip(self._crowds, world.groups, strict=True):
            if group.experts is not None:
                crowd.experts = ExpertCopies(group.experts, world.rules.broker_notice_s)
        self._num_workers = 0
        self._build_workers()
        turns = None
        if world.host.cores:
            turns = Turns(world.host, world.rules, self._agenda, self.figures, factors)
        self._turns = turns
        self._passage = Passage(
            world,
            self._crowds,
            self._agenda,
            self.figures,
            in_windows=not self._is_exact,
            factors=factors,
            choices=choices,
            losses=Block(rngs["loss"].random),
            turns=turns,
        )
        self._recovery = Recovery(
            world, self._crowds, self._agenda, self.figures, self._passage, choices, self._running
        )
        self._admission = Admission(world, load, self._agenda, self.figures, self._running)
        self._breakdowns = Breakdowns(
            world,
            self._crowds,
            self._agenda,
            self.figures,
            Block(rngs["failures"].random),
            new_worker=self._add_worker,
        )
        self._wire()

    def run(self) -> Outcome:
        """All of it."""
        self._admission.open()
        self._breakdowns.open()
        for number in range(NUM_BUCKETS):
            at_s = self._horizon_s * number / NUM_BUCKETS
            self._agenda.at(at_s, self._note_moment)
        until_s = self._horizon_s + DRAIN_S
        agenda, shown = self._agenda, 0

        def is_over(next_s: float) -> bool:
            nonlocal shown
            if self._show is not None and agenda.num_events - shown >= SHOW_EVERY:
                shown = agenda.num_events
                self._show(self._progress())
            if next_s <= self._horizon_s:
                return False
            idle = not self._running and self._admission.is_over
            return next_s > until_s or idle

        if self._is_exact:
            agenda.run(is_over)
        else:
            self._run_in_windows(is_over)
        self.figures.ended_s = max(agenda.now_s, self._horizon_s)
        if self._show is not None:
            self._show(self._progress())
        lost = self._num_lost()
        open_ones = len(self._running) + self._admission.num_waiting
        over_s = max(self.figures.ended_s, 1e-9)
        return Outcome(
            world=self._world,
            figures=self.figures,
            lost=lost,
            unfinished=open_ones - lost,
            num_workers=self._num_workers,
            num_nodes=self._breakdowns.num_nodes,
            num_events=agenda.num_events,
            is_exact=self._is_exact,
            tier_utilisation=self._passage.tiers.utilisation(over_s),
            tier_longest_waits_s=self._passage.tiers.longest_waits_s(),
        )

    def _run_in_windows(self, is_over: Callable[[float], bool]) -> None:
        """Windows up to each event, none longer than `window_s`; then the event."""
        agenda, passage = self._agenda, self._passage
        at_s = 0.0
        while not is_over(at_s):
            next_s = agenda.next_s
            end_s = min(next_s, at_s + self._window_s)
            if end_s > at_s:
                passage.window(end_s)
                at_s = end_s
            while agenda.next_s <= at_s:
                agenda.step()
            agenda.now_s = at_s

    def _wire(self) -> None:
        passage, recovery, breakdowns = self._passage, self._recovery, self._breakdowns
        passage.lost = recovery.lost
        passage.stranded = recovery.stranded
        passage.slow = recovery.slow
        passage.done = self._done
        passage.crashed = breakdowns.crash
        recovery.ended = self._failed
        self._admission.begin = self._begin
        breakdowns.died = self._worker_died
        breakdowns.experts_died = self._experts_died
        breakdowns.served = self._worker_serves
        breakdowns.uncovered = recovery.uncovered
        if self._turns is not None:
            self._turns.computed = passage.computed
            breakdowns.start_process = self._turns.start_process

    def _build_workers(self) -> None:
        """Replica by replica, so that neighbours serve neighbouring groups."""
        kinds = [
            [kind.slowness for kind in group.workers for _ in range(kind.count)]
            for group in self._world.groups
        ]
        for replica in range(max(map(len, kinds))):
            for group, slownesses in enumerate(kinds):
                if replica < len(slownesses):
                    self._add_worker(group, slownesses[replica])

    def _add_worker(self, group: int, slowness: float = 1.0) -> Worker:
        spec = self._world.groups[group]
        worker = Worker(
            self._num_workers,
            group,
            spec.nodes_per_worker,
            spec.turn_s * slowness,
            spec.row_s * slowness,
        )
        worker.is_watched = self._world.failures.crash_share > 0.0
        worker.settle()
        self._num_workers += 1
        self._crowds[group].add(worker)
        return worker

    def _begin(self, request: Request) -> None:
        now_s = self._agenda.now_s
        request.started_s = request.moved_s = now_s
        request.is_started = True
        request.route = [UNKNOWN] * len(self._crowds)
        self._passage.num_prefilling += 1
        self._passage.start(request, 0)

    def _done(self, item: Pass, ticket: int) -> None:
        """A pass is through all groups: its last row gives a token if it is the newest."""
        if item.ticket != ticket:
            return
        request, now_s = item.request, self._agenda.now_s
        request.kv_rows = max(request.kv_rows, item.end)
        if item.end <= request.committed_position:
            request.passes.remove(item)
            return
        request.num_tokens += 1
        waited_s = now_s - request.moved_s
        self._recovery.learn(waited_s, is_first=request.num_tokens == 1)
        if request.num_tokens == 1:
            request.first_s = now_s
            self.figures.first_token(now_s, now_s - request.arrive_s)
            self._passage.num_prefilling -= 1
            self._passage.num_decoding += 1
        else:
            self.figures.token(now_s, now_s - request.last_s)
        request.last_s = request.moved_s = now_s
        if request.running is not None:
            self._recovery.moved(request)
        if request.floor is not None or request.shunned is not None or request.attempts:
            request.floor = request.shunned = request.attempts = None
        if request.num_tokens >= request.num_wanted:
            self.figures.completed(now_s, now_s - request.arrive_s)
            self._end(request)
            return
        item.first, item.num_rows, item.group = item.end, 1, 0
        request.sent_rows = item.end
        self._passage.send(item, now_s)

    def _failed(self, request: Request, reason: str) -> None:
        self.figures.failed(reason)
        self._end(request)

    def _end(self, request: Request) -> None:
        for item in request.passes:
            item.ticket += 1
        request.passes.clear()
        request.epoch += 1
        request.look_ticket += 1
        request.running = None
        if request.num_tokens:
            self._passage.num_decoding -= 1
        else:
            self._passage.num_prefilling -= 1
        self._passage.leave(request)
        del self._running[request.number]
        self._admission.released(request)

    def _worker_died(self, worker: Worker) -> None:
        """What lay ahead of it is taken back: steps that it has not done by now find nobody."""
        now_s, group = self._agenda.now_s, worker.group
        if self._turns is not None:
            held = self._turns.held_by(worker)
            self._turns.dies(worker)
            for item, has_begun in held:
                self._recovery.lost(item, worker, now_s, worker.noticed_s, has_begun=has_begun)
            return
        start_s = worker.turn()[0]
        for item, at in self._under_way(group):
            if at is worker:
                has_begun = not now_s < start_s < item.until_s
                self._recovery.lost(item, worker, now_s, worker.noticed_s, has_begun=has_begun)

    def _under_way(self, group: int) -> list[tuple[Pass, Worker]]:
        """What a group has not done yet, and where that is."""
        now_s, is_sticky = self._agenda.now_s, self._world.rules.is_sticky
        found = []
        for request in self._running.values():
            for item in request.passes:
                if item.until_s > now_s and item.group - 1 == group:
                    worker = item.route[group][5] if is_sticky else item.worker
                    if worker is not None:
                        found.append((item, worker))
        return found

    def _experts_died(self, crowd: Crowd, share: float) -> None:
        """Steps under way in a group that had to do with an expert node."""
        noticed_s = self._agenda.now_s + self._world.rules.broker_notice_s
        for item, worker in self._under_way(crowd.group):
            if self._passage.draw() < share:
                now_s = self._agenda.now_s
                self._recovery.lost(item, worker, now_s, noticed_s, has_begun=False)

    def _worker_serves(self, worker: Worker) -> None:
        self._recovery.covered(worker.group)

    def _note_moment(self, _: None, __: int) -> None:
        now_s = self._agenda.now_s
        stops = [item.until_s for r in self._running.values() for item in r.passes]
        self.figures.moments.append(
            Moment(
                at_s=now_s,
                num_waiting=self._admission.num_waiting,
                num_running=len(self._running),
                num_still=self._recovery.num_still,
                num_workers_up=sum(crowd.num_up for crowd in self._crowds),
                num_spares=self._breakdowns.num_spares,
                num_dead_nodes=self._breakdowns.num_dead,
                longest_stop_s=max(0.0, max(stops, default=now_s) - now_s),
            )
        )

    def _num_lost(self) -> int:
        """Open requests of which nothing is planned any more."""
        planned = set()
        for item, ticket in self._agenda.waiting():
            if isinstance(item, Pass) and item.ticket == ticket:
                planned.add(item.request.number)
            elif isinstance(item, Request) and item.look_ticket == ticket:
                planned.add(item.number)
            elif isinstance(item, tuple) and isinstance(item[0], Pass):
                planned.add(item[0].request.number)
        planned.update(self._passage.flying())
        return sum(number not in planned for number in self._running)

    def _progress(self) -> Progress:
        figures = self.figures
        return Progress(
            now_s=self._agenda.now_s,
            horizon_s=self._horizon_s,
            num_arrived=figures.num_arrived,
            num_requests=len(self._load.asked),
            num_ended=figures.num_completed + figures.num_failed + figures.num_refused,
            num_running=len(self._running),
        )
