"""A request that runs, and its passes through the groups. Knows no worker's state.

P prompt tokens, k generated ones: the token that comes next has position P + k and needs the rows
of all before. A *pass* takes some rows through the groups: a slice of the prompt, or one row.
"""

from __future__ import annotations

from services.simulator.workers import INF, UNKNOWN, Clock, Worker
from shared.policy import Running


class Pass:
    """Rows `first` .. `first + num_rows` on their way. `group` is the next group, and until
    `until_s` the one before may still be at it; `worker` is where it is, if that is not plain from
    its route. `ticket` outdates its events."""

    __slots__ = ("first", "group", "num_rows", "request", "route", "ticket", "until_s", "worker")

    def __init__(self, request: Request, first: int, num_rows: int) -> None:
        self.request = request
        self.route = request.route
        self.first = first
        self.num_rows = num_rows
        self.group = 0
        self.until_s = -INF
        self.worker: Worker | None = None
        self.ticket = 0

    @property
    def end(self) -> int:
        return self.first + self.num_rows

    def num_groups_done(self, now_s: float) -> int:
        """The groups that have its rows in the store by now."""
        return self.group if self.until_s <= now_s else max(0, self.group - 1)


class Request:
    """One request. Times are infinite until they come. `kv_rows` are rows that all groups have,
    `floor` (G,) those that groups have from passes that were given up."""

    __slots__ = (
        "arrive_s", "attempts", "epoch", "first_s", "floor", "is_started", "kv_rows", "last_s",
        "look_ticket", "moved_s", "next_count_s", "num_prompt", "num_redrives", "num_tokens",
        "num_wanted", "number", "passes", "route", "running", "sent_rows", "sent_to", "shunned",
        "started_s",
    )  # fmt: skip

    def __init__(self, number: int, arrive_s: float, num_prompt: int, num_wanted: int) -> None:
        self.number = number
        self.arrive_s = arrive_s
        self.num_prompt = num_prompt
        self.num_wanted = num_wanted
        self.num_tokens = 0
        self.started_s = self.first_s = self.last_s = self.moved_s = 0.0
        self.is_started = False
        self.epoch = 0
        self.route: list[Clock] = []
        self.shunned: list[Worker | None] | None = None
        self.sent_to: Worker | None = None
        self.passes: list[Pass] = []
        self.kv_rows = self.sent_rows = 0
        self.floor: list[int] | None = None
        self.attempts: dict[tuple[int, int], int] | None = None
        self.running: Running | None = None
        self.look_ticket = 0
        self.next_count_s = 0.0
        self.num_redrives = 0

    @property
    def committed_position(self) -> int:
        return self.num_prompt - 1 + self.num_tokens

    def rows_by_group(self, num_groups: int, now_s: float) -> list[int]:
        """(G,) KV rows in the store now."""
        rows = [self.kv_rows] * num_groups
        if self.floor is not None:
            rows = [max(pair) for pair in zip(rows, self.floor, strict=True)]
        for item in sorted(self.passes, key=lambda item: item.first):
            for group in range(item.num_groups_done(now_s)):
                if rows[group] >= item.first:  # else there is a hole before it
                    rows[group] = max(rows[group], item.end)
        return rows

    def counts_attempt(self, group: int, position: int, *, has_begun: bool) -> int:
        """A step died with its worker; how often that has happened to it. The first time counts
        whether its computation had begun or not: nobody had marked it."""
        if self.attempts is None:
            self.attempts = {}
        before = self.attempts.get((group, position), 0)
        self.attempts[group, position] = before + (1 if has_begun or before == 0 else 0)
        return self.attempts[group, position]

    def forget_route(self, num_groups: int) -> list[Worker]:
        """Take all workers off its route; returns them."""
        workers = [clock[5] for clock in self.route if clock is not UNKNOWN]
        self.route = [UNKNOWN] * num_groups
        return workers
