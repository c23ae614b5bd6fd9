"""Turns of workers whose processes share the cores of one machine.

Here a turn waits for its worker and for a core, and takes all that waits at its worker, as a worker
does. Each turn is an event, so this is for some workers, not for a hundred thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.simulator.agenda import Agenda
from services.simulator.draws import Block
from services.simulator.figures import Figures
from services.simulator.requests import Pass
from services.simulator.workers import Worker
from services.simulator.world import Host, Rules

START_SLICE_S = 0.02  # a process that starts gives the core to others about so often


@dataclass(slots=True)
class _Start:
    """A process that starts: the seconds of a core that it needs yet."""

    left_s: float
    is_up: Callable[[], None]


class Turns:
    """All turns on one host. `computed` takes over a pass whose turn is over."""

    def __init__(
        self, host: Host, rules: Rules, agenda: Agenda, figures: Figures, factors: Block
    ) -> None:
        self.computed: Callable[[Pass, int, float], None]
        self._hop_cpu_s = host.hop_cpu_s
        self._num_free = host.cores
        self._max_rows = rules.max_batch_rows
        self._agenda = agenda
        self._figures = figures
        self._factors = factors
        self._waiting: dict[int, list[tuple[Pass, int]]] = {}  # by worker
        self._running: dict[int, list[tuple[Pass, int]]] = {}
        self._for_core: deque[Worker | _Start] = deque()

    def enter(self, item: Pass, worker: Worker, t: float) -> None:
        """A step reaches a worker at `t`."""
        self._agenda.at(t, self._entered, (item, worker), item.ticket)

    def held_by(self, worker: Worker) -> list[tuple[Pass, bool]]:
        """What a worker has, and whether it has begun it."""
        running = _valid(self._running.get(worker.index, ()))
        waiting = _valid(self._waiting.get(worker.index, ()))
        return [(item, True) for item, _ in running] + [(item, False) for item, _ in waiting]

    def dies(self, worker: Worker) -> None:
        """It holds nothing any more; its core is free."""
        self._waiting.pop(worker.index, None)
        if self._running.pop(worker.index, None) is not None:
            self._release()

    def start_process(self, cpu_s: float, is_up: Callable[[], None]) -> None:
        """A process that starts takes so much of a core, beside the others, and is up then."""
        self._for_core.append(_Start(cpu_s, is_up))
        self._give_cores()

    def _entered(self, at: tuple[Pass, Worker], ticket: int) -> None:
        item, worker = at
        if item.ticket != ticket:
            return
        waiting = self._waiting.setdefault(worker.index, [])
        waiting.append((item, ticket))
        if len(waiting) == 1 and worker.index not in self._running:
            self._for_core.append(worker)
            self._give_cores()

    def _give_cores(self) -> None:
        while self._num_free and self._for_core:
            turn = self._for_core.popleft()
            if isinstance(turn, _Start):
                self._num_free -= 1
                took_s = min(turn.left_s, START_SLICE_S)
                turn.left_s -= took_s
                self._agenda.at(self._agenda.now_s + took_s, self._started, turn)
            elif self._waiting.get(turn.index) and turn.index not in self._running:
                self._num_free -= 1
                self._begin(turn)

    def _begin(self, worker: Worker) -> None:
        waiting = _valid(self._waiting.pop(worker.index))
        batch: list[tuple[Pass, int]] = []
        num_rows = 0
        for number, (item, ticket) in enumerate(waiting):
            if batch and num_rows + item.num_rows > self._max_rows:
                self._waiting[worker.index] = waiting[number:]
                break
            batch.append((item, ticket))
            num_rows += item.num_rows
        self._running[worker.index] = batch
        took_s = (worker.clock[3] + worker.clock[4] * num_rows) * self._factors.one()
        took_s += self._hop_cpu_s * len(batch)
        self._figures.busy(self._agenda.now_s, took_s)
        self._agenda.at(self._agenda.now_s + took_s, self._ended, (worker, batch))

    def _ended(self, turn: tuple[Worker, list[tuple[Pass, int]]], _: int) -> None:
        worker, batch = turn
        if self._running.get(worker.index) is not batch:
            return  # it died meanwhile
        del self._running[worker.index]
        if self._waiting.get(worker.index):
            self._for_core.append(worker)
        self._release()
        for item, ticket in batch:
            if item.ticket == ticket:
                self.computed(item, worker.group, self._agenda.now_s)

    def _started(self, start: _Start, _: int) -> None:
        if start.left_s > 0.0:
            self._for_core.append(start)
        else:
            start.is_up()
        self._release()

    def _release(self) -> None:
        self._num_free += 1
        self._give_cores()


def _valid(entries: Iterable[tuple[Pass, int]]) -> list[tuple[Pass, int]]:
    """Those that were not taken back meanwhile."""
    return [(item, ticket) for item, ticket in entries if item.ticket == ticket]
