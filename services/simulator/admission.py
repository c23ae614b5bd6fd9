"""Lets requests in, as the request queue and a scheduler's budget do. Knows no worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from services.simulator.agenda import Agenda
from services.simulator.figures import Figures
from services.simulator.load import Load
from services.simulator.requests import Request
from services.simulator.world import World
from shared.kv_budget import KvBudget


class Admission:
    """`begin` starts a request that is let in."""

    def __init__(
        self,
        world: World,
        load: Load,
        agenda: Agenda,
        figures: Figures,
        running: dict[int, Request],
    ) -> None:
        self.begin: Callable[[Request], None]
        self._load = load
        self._agenda = agenda
        self._figures = figures
        self._running = running
        self._max_queued = world.rules.max_queued
        self._budget = KvBudget(world.rules.kv_budget_bytes, world.rules.max_in_flight)
        self._row_bytes = sum(group.kv_row_bytes for group in world.groups)
        self._waiting: deque[Request] = deque()
        self._next = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_over(self) -> bool:
        """Whether all requests have come, and none of them waits."""
        return self._figures.num_arrived >= len(self._load.asked) and not self._waiting

    def open(self) -> None:
        """Let the first requests come."""
        for _ in range(self._load.concurrency or 1):
            self._plan_next()

    def released(self, request: Request) -> None:
        """A request has ended: there is room for another."""
        self._budget.release(str(request.number))
        if self._load.concurrency is not None:
            self._plan_next()
        self._let_in()

    def _plan_next(self) -> None:
        if self._next < len(self._load.asked):
            number, self._next = self._next, self._next + 1
            self._agenda.at(self._load.asked[number].at_s, self._arrive, number)

    def _arrive(self, number: int, _: int) -> None:
        asked = self._load.asked[number]
        self._figures.num_arrived += 1
        if self._load.concurrency is None:
            self._plan_next()
        if len(self._waiting) >= self._max_queued:
            self._figures.num_refused += 1
            if self._load.concurrency is not None:
                self._plan_next()
            return
        now_s = self._agenda.now_s
        self._waiting.append(Request(number, now_s, asked.num_prompt, asked.num_tokens))
        self._let_in()

    def _let_in(self) -> None:
        """In order: those behind a big one wait too, or it would starve."""
        while self._waiting:
            request = self._waiting[0]
            num_bytes = round((request.num_prompt + request.num_wanted) * self._row_bytes)
            if not self._budget.fits(num_bytes):
                return
            self._waiting.popleft()
            self._budget.reserve(str(request.number), num_bytes)
            self._running[request.number] = request
            self.begin(request)
