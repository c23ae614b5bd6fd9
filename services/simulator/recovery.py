"""Brings lost steps back, as a cluster does: the inbox hands over, the scheduler drives again.

What becomes of a request that stands still is decided by `shared.policy`, from what a scheduler
would know: the ledger's last token, and the KV rows of each group when it counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from services.simulator.agenda import Agenda
from services.simulator.draws import Block
from services.simulator.figures import Figures
from services.simulator.passage import Passage
from services.simulator.requests import Pass, Request
from services.simulator.workers import INF, UNKNOWN, Crowd, Worker
from services.simulator.world import World
from shared import policy
from shared.liveness import PRESENCE_TTL_MS
from shared.policy import End, Pace, Redrive, Running, Surroundings, Wait

POLL_S = 0.05  # a scheduler looks so often
LEARN_EVERY = 16  # tokens: the pace is a median of 32, and any of them are as good as the others


_BEFORE_ITS_FIRST = Running(0, 0, moved_s=0.0, started_s=0.0)
_AFTER_ITS_FIRST = replace(_BEFORE_ITS_FIRST, has_moved=True)


class Recovery:
    """The requests that stand still. `ended` is told of those that the policy ends."""

    def __init__(
        self,
        world: World,
        crowds: list[Crowd],
        agenda: Agenda,
        figures: Figures,
        passage: Passage,
        choices: Block,
        running: dict[int, Request],
    ) -> None:
        self.ended: Callable[[Request, str], None]
        self._world = world
        self._crowds = crowds
        self._agenda = agenda
        self._figures = figures
        self._passage = passage
        self._choices = choices
        self._running = running
        self._limits = world.rules.redrive
        self._num_groups = len(world.groups)
        self._pace = Pace()
        self._num_learnt = 0
        self._uncovered_s: dict[int, float] = {}  # group -> when the scheduler saw it
        self._stranded: dict[int, list[tuple[Pass, int]]] = {}

    @property
    def num_still(self) -> int:
        return sum(request.running is not None for request in self._running.values())

    def learn(self, took_s: float, *, is_first: bool) -> None:
        """A request moved after so long."""
        self._num_learnt += 1
        if self._num_learnt > 64 and self._num_learnt % LEARN_EVERY:
            return
        before = Running(0, 0, moved_s=0.0, started_s=0.0, has_moved=not is_first)
        self._learn(before, replace(before, moved_s=took_s, has_moved=True))

    def _learn(self, before: Running, after: Running) -> None:
        self._pace.note(before, after)
        patience_s = min(
            policy.patience_s(usual, self._typical_s(usual), self._limits)
            for usual in (_BEFORE_ITS_FIRST, _AFTER_ITS_FIRST)
        )
        self._passage.stall_s = patience_s / 4

    def lost(
        self, item: Pass, worker: Worker, arrived_s: float, noticed_s: float, *, has_begun: bool
    ) -> None:
        """A step came to a dead node at `arrived_s`, or was there when it died."""
        request, group = item.request, worker.group
        item.ticket += 1
        item.group = group
        item.until_s = self._agenda.now_s
        attempts = request.counts_attempt(group, item.first, has_begun=has_begun)
        rules = self._world.rules
        at_s = max(arrived_s + rules.inbox_ttl_s, noticed_s)
        if attempts >= rules.max_attempts:
            self._agenda.at(at_s, self._bury, item, item.ticket)
        else:
            self._agenda.at(at_s, self._hand_over, item, item.ticket)
        self.watch(request)

    def stranded(self, item: Pass) -> None:
        """No worker of its group takes it: it waits in the group's queue."""
        item.ticket += 1
        self._stranded.setdefault(item.group, []).append((item, item.ticket))
        self.watch(item.request)

    def covered(self, group: int) -> None:
        """A worker of the group serves: it takes what waits there."""
        self._uncovered_s.pop(group, None)
        for item, ticket in self._stranded.pop(group, []):
            self._hand_over(item, ticket)

    def uncovered(self, group: int) -> None:
        """The last worker of a group is gone; the scheduler sees it when presence forgets it."""
        seen_s = self._agenda.now_s + PRESENCE_TTL_MS / 1e3
        self._uncovered_s[group] = seen_s
        self._agenda.at(seen_s + self._limits.uncovered_grace_s, self._end_uncovered, group)

    def watch(self, request: Request) -> None:
        """Look at a request from when it has stood still for half of its patience."""
        if request.running is not None:
            return
        request.running = running = Running(
            epoch=request.epoch,
            committed_position=request.committed_position,
            moved_s=request.moved_s,
            started_s=request.started_s,
            rows=None if request.num_tokens else (request.kv_rows,) * self._num_groups,
            most_rows=0 if request.num_tokens else request.kv_rows * self._num_groups,
            has_moved=request.num_tokens > 0,
        )
        patience_s = policy.patience_s(running, self._typical_s(running), self._limits)
        self._look_at(request, running.moved_s + patience_s / 2)

    def slow(self, request: Request) -> None:
        """It takes long, though nothing is known to be lost: the scheduler cannot know that."""
        if request.running is None:
            self._passage.rebalance(request)
        self.watch(request)

    def moved(self, request: Request) -> None:
        """It has committed a token: it needs no watching."""
        request.running = None
        request.look_ticket += 1

    def _look_at(self, request: Request, at_s: float) -> None:
        request.look_ticket += 1
        poll_s = POLL_S * self._choices.one()
        self._agenda.at(at_s + poll_s, self._look, request, request.look_ticket)

    def _look(self, request: Request, ticket: int) -> None:
        """What a scheduler's look does for one request."""
        if request.look_ticket != ticket or request.running is None:
            return
        now_s = self._agenda.now_s
        around = self._around(now_s)
        running = request.running
        if around.uncovered_group is not None:
            # Nobody could move: that time is held against no request.
            request.running = running.excused(POLL_S * 20, now_s=now_s)
            self._look_at(request, now_s + POLL_S * 20)
            return
        rows = request.rows_by_group(self._num_groups, now_s)
        counted = request.running = running.counted(rows, now_s=now_s)
        self._learn(running, counted)
        running = counted
        typical_s = self._typical_s(running)
        match policy.decide(running, around, typical_s, self._limits):
            case Wait():
                patience_s = policy.patience_s(running, typical_s, self._limits)
                still_until_s = running.moved_s + patience_s
                next_s = now_s + patience_s / 4
                self._look_at(request, max(now_s + POLL_S, min(next_s, still_until_s)))
            case End(reason=reason):
                self.ended(request, _without_numbers(reason))
            case Redrive(position=position):
                self._redrive(request, position, rows)

    def _redrive(self, request: Request, position: int, rows: list[int]) -> None:
        now_s = self._agenda.now_s
        request.epoch += 1
        request.num_redrives += 1
        for item in request.passes:
            item.ticket += 1
        request.passes.clear()
        request.floor = rows
        request.shunned = [
            None if clock is UNKNOWN else clock[5] for clock in request.route
        ]  # whoever had it may have come to a stop
        self._passage.leave(request)
        request.sent_to = self._other_worker(request, now_s)
        if request.sent_to is not None:
            self._passage.move(request, 0, request.sent_to)
        assert request.running is not None
        jitter = 0.75 + 0.25 * self._choices.one()
        request.running = request.running.redriven(epoch=request.epoch, now_s=now_s, jitter=jitter)
        self._figures.redriven(now_s)
        self._passage.start(request, position)
        if request.running is not None:  # else it has ended within
            patience_s = policy.patience_s(
                request.running, self._typical_s(request.running), self._limits
            )
            self._look_at(request, now_s + patience_s / 2)

    def _other_worker(self, request: Request, now_s: float) -> Worker | None:
        """As the scheduler picks the worker of group 0 for a step that it sends again."""
        peers = [w for w in self._crowds[0].workers if now_s < w.gone_s and w.is_serving(now_s)]
        peers = [w for w in peers if w is not request.sent_to] or peers
        peers = [w for w in peers if not w.is_silent(now_s)] or peers
        if not peers:
            return None
        return peers[int(self._choices.one() * len(peers))]

    def _hand_over(self, item: Pass, ticket: int) -> None:
        """The broker moves a step to its group's queue, where any worker takes it."""
        if item.ticket != ticket:
            return
        now_s, request = self._agenda.now_s, item.request
        crowd = self._crowds[item.group]
        worker = crowd.take(now_s)
        if worker is None:
            self.stranded(item)
            return
        self._figures.num_handovers += 1
        waits_s = self._passage.move(request, item.group, worker)
        self._passage.send(item, now_s + waits_s)

    def _bury(self, item: Pass, ticket: int) -> None:
        if item.ticket == ticket:
            self._figures.num_poisoned += 1
            self.ended(item.request, "its input ended several workers")

    def _around(self, now_s: float) -> Surroundings:
        uncovered = {g: s for g, s in self._uncovered_s.items() if s <= now_s}
        group = min(uncovered, default=None)
        return Surroundings(
            now_s=now_s,
            now_unix_ms=0,
            num_groups=self._num_groups,
            uncovered_group=group,
            uncovered_since_s=0.0 if group is None else uncovered[group],
        )

    def _end_uncovered(self, group: int, _: int) -> None:
        """A while after a group lost its last worker: end what the policy ends, and look again."""
        now_s = self._agenda.now_s
        if self._uncovered_s.get(group, INF) > now_s:
            return
        around = self._around(now_s)
        for request in [r for r in self._running.values() if r.is_started]:
            running = Running(
                epoch=request.epoch,
                committed_position=request.committed_position,
                moved_s=request.moved_s,
                started_s=request.started_s,
            )
            end = policy.decide_end(running, around, self._limits)
            if isinstance(end, End):
                self.ended(request, "a layer group had no live worker")
        self._agenda.at(now_s + 1.0, self._end_uncovered, group)

    def _typical_s(self, running: Running) -> float:
        return self._pace.typical_s(running, self._limits.unknown_pace_s)


def _without_numbers(reason: str) -> str:
    """Reasons that differ in a position or a group alone are counted together."""
    return "no progress after all re-drives" if "attempts" in reason else reason
