"""Takes passes through the groups: a turn here, a hop there. The simulator's hot loop is in here.

There are two ways, with the same clocks. *Exact*: each arrival at a worker is an event. *Windows*:
what arrives within a short time is taken group by group, each group's arrivals in their order. A
pass that leaves a group reaches the next within the same window, and comes round to group 0 no
sooner than in the next one, if a window is no longer than a token's way: the conservative lookahead
of parallel simulation (Chandy and Misra, 1979). So both take steps in the same order, and a window
costs a third of an event. It ends early where an event is due, so whatever dies finds passes where
they are.

A step that comes before a waiting turn begins joins it: steps that wait share a turn, as they do in
a worker. The worker is busy for as long as that batch takes; those that joined first end by their
own rows, not by those of all, so a batch is as long as it is, and its mean latency a little short.

Longer than other modules: both ways and what they share stay side by side, so that they agree.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Protocol

from services.simulator.agenda import Agenda
from services.simulator.draws import Block
from services.simulator.figures import Figures
from services.simulator.requests import Pass, Request
from services.simulator.tiers import Tiers
from services.simulator.turns import Turns
from services.simulator.workers import INF, UNKNOWN, Crowd, Worker
from services.simulator.world import World
from shared.prefill import rows_beside_decoding

# Of each packet's loss: 1,460 bytes of payload (RFC 879's maximum segment on Ethernet).
PACKET_BYTES = 1460


class Lost(Protocol):
    """Takes over a step that came to a dead node at `arrived_s`, or was there when it died; the
    broker gives it on at `noticed_s`."""

    def __call__(
        self, item: Pass, worker: Worker, arrived_s: float, noticed_s: float, *, has_begun: bool
    ) -> None: ...


class Passage:
    """All passes of a world. `lost` takes over what came to a worker that does not answer,
    `stranded` what no worker of its group can take, `done` what is through all groups."""

    def __init__(
        self,
        world: World,
        crowds: list[Crowd],
        agenda: Agenda,
        figures: Figures,
        *,
        in_windows: bool,
        factors: Block,
        choices: Block,
        losses: Block,
        turns: Turns | None,
    ) -> None:
        self.lost: Lost
        self.stranded: Callable[[Pass], None]
        self.done: Callable[[Pass, int], None]
        self.slow: Callable[[Request], None]
        self.crashed: Callable[[Worker, int], None]
        self.tiers = Tiers(world.network)
        self.stall_s = INF  # a stop that takes longer may look as if its step were lost
        self.num_prefilling = self.num_decoding = 0
        self._world = world
        self._crowds = crowds
        self._agenda = agenda
        self._figures = figures
        self._factors = factors
        self._choices = choices
        self._losses = losses
        self._turns = turns
        self._num_groups = len(world.groups)
        self._max_rows = world.rules.max_batch_rows
        self._boxes: list[list[tuple[float, int, Pass, int]]] = []
        if in_windows:
            self._boxes = [[] for _ in range(self._num_groups + 1)]
        self._number = 0
        self._wait_s = self._charged_s = 0.0
        self._num_uncharged = 0
        self._packets_left = self._until_lost()
        self._hops = [self._hop_s(group, 1) for group in range(self._num_groups)]
        self._messages = sum(group.messages for group in world.groups) / self._num_groups
        self._row_bytes = sum(group.moved_bytes for group in world.groups) / self._num_groups
        slowest = max(world.groups, key=lambda group: group.turn_s + group.row_s)
        self._decode_turn_s = slowest.turn_s + slowest.row_s
        self._row_s = slowest.row_s

    def start(self, request: Request, position: int) -> None:
        """Send all known tokens from `position` on to group 0, in slices."""
        request.sent_rows = position
        self.next_slice(request, request.epoch)

    def next_slice(self, request: Request, epoch: int) -> None:
        """Start the next slice of what is not sent yet."""
        left = request.committed_position + 1 - request.sent_rows
        if request.epoch != epoch or left <= 0:
            return
        num_rows = min(left, self._slice_rows(left))
        item = Pass(request, request.sent_rows, num_rows)
        request.sent_rows += num_rows
        request.passes.append(item)
        self.send(item, self._agenda.now_s)

    def send(self, item: Pass, t: float) -> None:
        """A pass leaves for its next group at `t`."""
        t += self._hop_s(item.group, item.num_rows) + self._lost_s(item.num_rows)
        if self._boxes:
            self._number += 1
            self._boxes[item.group].append((t, self._number, item, item.ticket))
        else:
            self._agenda.at(t, self._arrives, item, item.ticket)

    def window(self, end_s: float) -> None:
        """Take everything that arrives before `end_s` as far as it gets until then."""
        num_visits, self._num_uncharged = self._num_uncharged, 0
        for group, box in enumerate(self._boxes[:-1]):
            while box:
                box.sort()
                if box[0][0] >= end_s:
                    break
                num_taken = bisect_left(box, (end_s,))
                arrived = box[:num_taken]
                del box[:num_taken]
                num_visits += num_taken
                self._take(group, arrived, end_s)
                if group:
                    break  # only group 0 gets more within: the next slices of prompts
        if num_visits and self.tiers.names and end_s > self._charged_s:
            self._wait_s = self.tiers.delay_over(
                self._charged_s, end_s, num_visits * self._messages, num_visits * self._row_bytes
            )
            self._charged_s = end_s
        else:
            self._num_uncharged += num_visits
        self._end_passes(end_s)
        self._agenda.now_s = end_s

    def _take(self, group: int, arrived: list[tuple[float, int, Pass, int]], end_s: float) -> None:
        """Compute the steps that arrived at one group, in this order."""
        loss_s, stall_s = self._lost_s, self.stall_s
        row_packets = self._row_bytes // PACKET_BYTES + 1
        factors = self._factors.run(len(arrived))
        is_last, is_lossy = group + 1 == self._num_groups, self._world.network.loss > 0.0
        append = self._boxes[group + 1].append
        wait_s = self._wait_s
        if (experts := self._crowds[group].experts) is not None:
            wait_s += experts.wait_s(arrived[0][0], len(arrived))
        usual_hop_s = 0.0 if is_last else self._hops[group + 1] + wait_s
        number, max_rows, busy_s = self._number, self._max_rows, 0.0
        for (t, _, item, ticket), factor in zip(arrived, factors, strict=True):
            if ticket != item.ticket:
                continue
            rows, clock = item.num_rows, item.route[group]
            start_s, done_s, num_rows, turn_s, row_s, _worker = clock
            if t <= start_s and num_rows + rows <= max_rows:
                took_s = row_s * rows
                clock[2] = num_rows + rows
                done_s += took_s
            elif t < done_s:
                if done_s == INF:
                    self._agenda.now_s = t
                    self._number = number
                    met = self._meet(item, group, t)
                    number = self._number
                    if met is None:
                        continue
                    clock, took_s, t = met[0].clock, 0.0, met[1]
                    done_s = self._compute(rows, met[0], t)
                else:
                    took_s = (turn_s + row_s * rows) * factor
                    clock[0], clock[2] = done_s, rows
                    done_s += took_s
            else:
                took_s = (turn_s + row_s * rows) * factor
                clock[0], clock[2] = t, rows
                done_s = t + took_s
            clock[1] = item.until_s = done_s
            busy_s += took_s
            item.group = group + 1
            number += 1
            if done_s - t > stall_s:
                self.slow(item.request)
            if is_last:
                append((done_s, number, item, ticket))
            else:
                hop_s = usual_hop_s
                if rows > 1:
                    hop_s = self._hop_s(group + 1, rows) + wait_s
                if is_lossy:
                    if rows > 1 or self._packets_left < row_packets:
                        hop_s += loss_s(rows)
                    else:
                        self._packets_left -= row_packets
                append((done_s + hop_s, number, item, ticket))
            if group == 0 and item.end <= item.request.committed_position:
                self._agenda.now_s, self._number = done_s, number
                self.next_slice(item.request, item.request.epoch)
                number = self._number
        self._number = number
        self._figures.busy(end_s, busy_s)

    def computed(self, item: Pass, group: int, t: float) -> None:
        """A group has computed a pass: it goes on."""
        item.group = group + 1
        if group == 0 and item.end <= item.request.committed_position:
            self.next_slice(item.request, item.request.epoch)
        if item.group == self._num_groups:
            self.done(item, item.ticket)
        else:
            self.send(item, t + self._charge(t))

    def reroute(self, request: Request, group: int, worker: Worker) -> None:
        """Put a worker on the route of a request."""
        before = request.route[group]
        if before is not UNKNOWN:
            self._crowds[group].counts(before[5], -1)
        request.route[group] = worker.clock
        self._crowds[group].counts(worker, 1)

    def move(self, request: Request, group: int, worker: Worker) -> float:
        """Put a worker on the route; returns the seconds that it reads KV rows of the request."""
        if request.route[group] is worker.clock:
            return 0.0
        self.reroute(request, group, worker)
        num_bytes = request.kv_rows * self._world.groups[group].kv_row_bytes
        if not num_bytes:
            return 0.0
        network = self._world.network
        # A window has its waits already, and what it reads is little beside all its steps.
        wait_s = self._wait_s
        if not self._boxes:
            wait_s = self.tiers.delay(self._agenda.now_s, 1, num_bytes)
        return wait_s + network.hop_s + num_bytes / worker.num_nodes / network.node_bytes_per_s

    def leave(self, request: Request) -> None:
        """Take a request off all of its workers."""
        for worker in request.forget_route(self._num_groups):
            self._crowds[worker.group].counts(worker, -1)

    def flying(self) -> Iterator[int]:
        """The numbers of requests that have a pass on its way, if it goes in windows."""
        for box in self._boxes:
            yield from (i.request.number for _, _, i, ticket in box if i.ticket == ticket)

    def draw(self) -> float:
        """A number in 0..1 for a choice."""
        return self._choices.one()

    def rebalance(self, request: Request) -> None:
        """Let the policy look at those stops of a route where many wait; for a slow request."""
        now_s = self._agenda.now_s
        for group, clock in enumerate(request.route):
            if clock[0] > now_s and clock[2] >= 4:
                crowd = self._crowds[group]
                chosen = crowd.choose(clock[5], None, now_s)
                if chosen is not None and chosen is not clock[5]:
                    self.reroute(request, group, chosen)

    def _end_passes(self, end_s: float) -> None:
        """Those that are through all groups by then, in order of time."""
        box = self._boxes[-1]
        box.sort()
        num_taken = bisect_left(box, (end_s,))
        ended = box[:num_taken]
        del box[:num_taken]
        for t, _, item, ticket in ended:
            self._agenda.now_s = t
            self.done(item, ticket)

    def _slice_rows(self, left: int) -> int:
        limit = self._world.rules.max_slice_rows
        if left == 1 or self.num_decoding == 0:
            return limit
        return rows_beside_decoding(
            self._decode_turn_s,
            self._row_s,
            num_prompts=max(1, self.num_prefilling),
            num_decoding=self.num_decoding,
            max_rows=limit,
        )

    def _hop_s(self, group: int, rows: int) -> float:
        """Seconds to a group without any wait; bytes go to the broker, and from it."""
        network, before = self._world.network, self._world.groups[group - 1]
        num_bytes = rows * self._world.groups[group].wire_bytes
        out_s = before.out_s + rows * before.out_row_s
        return out_s + network.hop_s + 2 * num_bytes / network.node_bytes_per_s

    def _charge(self, now_s: float) -> float:
        """Account for a hop on what all share; returns what it waits there. Of windows it is
        charged with the next one, and waits as the steps of the last one."""
        if self._boxes:
            self._num_uncharged += 1
        elif self.tiers.names:
            self._wait_s = self.tiers.delay(now_s, self._messages, self._row_bytes)
        return self._wait_s

    def _lost_s(self, rows: int) -> float:
        """What lost packets of a hop cost: their sender waits, and sends them again.

        How many packets come through before the next is lost is drawn once for all of them.
        """
        network = self._world.network
        if not network.loss:
            return 0.0
        self._packets_left -= rows * self._row_bytes // PACKET_BYTES + 1
        if self._packets_left >= 0:
            return 0.0
        self._packets_left = self._until_lost()
        return network.retransmit_s

    def _until_lost(self) -> float:
        """Packets that come through before one does not: geometric."""
        loss = self._world.network.loss
        return math.log1p(-self._losses.one()) / math.log1p(-loss) if loss else INF

    def _arrives(self, item: Pass, ticket: int) -> None:
        """A pass arrives at its next group, as an event."""
        if item.ticket == ticket:
            met = self._meet(item, item.group, self._agenda.now_s)
            if met is not None:
                self._turn(item, *met)

    def _meet(self, item: Pass, group: int, t: float) -> tuple[Worker, float] | None:
        """A closer look at a stop: there may be no worker, or a dead one. The worker that computes
        the step as usual, and from when on; None if the step goes another way."""
        request, crowd = item.request, self._crowds[group]
        worker: Worker | None = item.route[group][5]
        if not self._world.rules.is_sticky:
            worker = crowd.take(t)
        elif worker is None or not worker.is_serving(t) or worker.is_silent(t):
            shunned = request.shunned[group] if request.shunned is not None else None
            worker = crowd.choose(worker, shunned, t) or crowd.take(t)
            if worker is not None:
                t += self.move(request, group, worker)
        item.worker = worker
        if worker is None:
            self.stranded(item)
        elif worker.is_dead:
            self.lost(item, worker, t, worker.noticed_s, has_begun=False)
        elif crowd.experts is not None and self._choices.one() < crowd.experts.hit_share(t):
            noticed_s = t + self._world.rules.broker_notice_s
            self.lost(item, worker, t, noticed_s, has_begun=False)
        elif self._turns is not None:
            self._turns.enter(item, worker, t)
        elif worker.is_closed and self._boxes:
            self._turn(item, worker, t)
        else:
            return worker, t
        return None

    def _turn(self, item: Pass, worker: Worker, t: float) -> None:
        """A live worker computes a step, and maybe fails it; its end is an event."""
        done_s = self._compute(item.num_rows, worker, t)
        failures = self._world.failures
        item.until_s = done_s
        item.group = worker.group + 1
        if done_s - t > self.stall_s:
            self.slow(item.request)
        if failures.crash_share and self._choices.one() < failures.crash_share:
            item.until_s = INF
            self._agenda.at(done_s, self.crashed, worker)
        elif worker.is_flaky and self._fails(item, worker, done_s):
            item.group = worker.group
            item.ticket += 1
            self._agenda.at(done_s, self.hand_back, item, item.ticket)
        else:
            self._agenda.at(done_s, self._turn_ends, item, item.ticket)

    def _turn_ends(self, item: Pass, ticket: int) -> None:
        if item.ticket == ticket:
            self.computed(item, item.group - 1, self._agenda.now_s)

    def _compute(self, rows: int, worker: Worker, t: float) -> float:
        """What the loop of a window does, for any clock: when the step will be done."""
        start_s, end_s, num_rows = worker.turn()
        turn_s, row_s = worker.clock[3], worker.clock[4]
        if t <= start_s and num_rows + rows <= self._max_rows:
            took_s = row_s * rows
            worker.set_turn(start_s, end_s + took_s, num_rows + rows)
        else:
            start_s = max(t, end_s)
            took_s = (turn_s + row_s * rows) * self._factors.one()
            worker.set_turn(start_s, start_s + took_s, rows)
        done_s = worker.free_s
        self._figures.busy(done_s, took_s)
        return done_s

    def _fails(self, item: Pass, worker: Worker, done_s: float) -> bool:
        """Whether a flaky worker fails a step; after some of different requests it rests."""
        assert worker.quarantine is not None, "whoever turns flaky has one"
        if self._choices.one() >= self._world.failures.flaky_share:
            worker.quarantine.succeeded()
            return False
        worker.quarantine.failed(str(item.request.number))
        self._figures.num_failed_steps += 1
        if worker.quarantine.is_due:
            worker.resting_until_s = done_s + worker.quarantine.begin()
            self._figures.num_quarantines += 1
        return True

    def hand_back(self, item: Pass, ticket: int) -> None:
        """A step whose worker could not compute it: another of its group takes it."""
        if item.ticket != ticket:
            return
        now_s, request = self._agenda.now_s, item.request
        worker = self._crowds[item.group].take(now_s, item.worker)
        if worker is None:
            self.stranded(item)
            return
        self.send(item, now_s + self.move(request, item.group, worker))
