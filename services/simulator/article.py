"""The article's small simulator, and cellpipe's policy in the same world.

Ten nodes take tasks from one queue. An attempt at a task ends its node with a probability of 15 %;
the task is tried again at once, three times at most, and is lost after that. The node comes back a
while later. Nothing remembers a task that was given up.

In cellpipe the requester hears of every end. What ended three workers counts as poison, for nobody
can tell an input that kills from bad luck: in a world as unlucky as this one that costs more named
errors than the article's fourth try, and still nothing is lost. With four attempts both try as
often.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace

import numpy as np

from services.simulator.draws import streams
from services.simulator.load import Asked, Load, Poisson
from services.simulator.simulation import Outcome, Simulation
from services.simulator.world import Failures, Group, Rules, WorkerSet, World

TASK_S = 0.1
PER_S = 10.0
RESTART_S = 1.0
MAX_ATTEMPTS = Rules().max_attempts


@dataclass(frozen=True, slots=True)
class Article:
    """Its world: a task takes `TASK_S` of a node, and a node that crashed is away `RESTART_S`."""

    num_nodes: int = 10
    crash_share: float = 0.15
    max_retries: int = 3
    num_tasks: int = 10_000

    @property
    def expected_lost_share(self) -> float:
        """All attempts of a task fail."""
        return self.crash_share ** (self.max_retries + 1)


@dataclass(frozen=True, slots=True)
class Row:
    """How one of the two did. `failed` were ended by name, `lost` without a word. Seconds are those
    of the tasks that were done."""

    name: str
    done: int
    failed: int
    lost: int
    attempts: int
    mean_s: float
    p99_s: float


def run_article(article: Article, *, seed: int = 0) -> Row:
    """Tasks in order of arrival, each to the node that is free first."""
    rngs = streams(seed)
    arrivals = Poisson(PER_S).times(article.num_tasks, rngs["arrivals"])
    crashes = rngs["choices"]
    nodes = [0.0] * article.num_nodes  # when each is free
    waiting = [(at_s, number, 0) for number, at_s in enumerate(arrivals)]
    heapq.heapify(waiting)
    took: list[float] = []
    lost = attempts = 0
    while waiting:
        ready_s, number, num_retries = heapq.heappop(waiting)
        begin_s = max(ready_s, heapq.heappop(nodes))
        end_s = begin_s + TASK_S
        attempts += 1
        if crashes.random() >= article.crash_share:
            heapq.heappush(nodes, end_s)
            took.append(end_s - arrivals[number])
            continue
        heapq.heappush(nodes, end_s + RESTART_S)
        if num_retries < article.max_retries:
            heapq.heappush(waiting, (end_s, number, num_retries + 1))
        else:
            lost += 1
    times = np.array(took)
    return Row(
        "the article",
        len(took),
        0,
        lost,
        attempts,
        float(times.mean()) if len(times) else 0.0,
        float(np.quantile(times, 0.99)) if len(times) else 0.0,
    )


def article_world(article: Article, *, max_attempts: int = MAX_ATTEMPTS) -> World:
    """The same nodes as workers of one group, with cellpipe's rules."""
    return World(
        groups=(Group(turn_s=TASK_S, row_s=0.0, workers=(WorkerSet(article.num_nodes),)),),
        failures=Failures(crash_share=article.crash_share, restart_s=RESTART_S),
        rules=replace(Rules(), max_attempts=max_attempts, max_batch_rows=1, max_in_flight=None),
        variation=0.0,
        name=f"{article.num_nodes} nodes, {article.crash_share:.0%} crash",
    )


def run_cellpipe(
    article: Article, *, seed: int = 0, max_attempts: int = MAX_ATTEMPTS
) -> tuple[Row, Outcome]:
    """The same tasks at the same times: requests of one token."""
    arrivals = Poisson(PER_S).times(article.num_tasks, streams(seed)["arrivals"])
    load = Load(tuple(Asked(at_s, 1, 1) for at_s in arrivals))
    world = article_world(article, max_attempts=max_attempts)
    outcome = Simulation(world, load, horizon_s=arrivals[-1], seed=seed).run()
    figures, times = outcome.figures, outcome.figures.whole_s
    row = Row(
        f"cellpipe, {max_attempts} attempts",
        figures.num_completed,
        figures.num_failed,
        outcome.lost,
        figures.num_completed + figures.num_process_deaths,
        float(times.mean()) if len(times) else 0.0,
        float(np.quantile(times, 0.99)) if len(times) else 0.0,
    )
    return row, outcome


def compare(article: Article, *, seed: int = 0) -> list[Row]:
    """The article, cellpipe as it is, and cellpipe with as many attempts as the article."""
    tries = [MAX_ATTEMPTS, article.max_retries + 1]
    rows = [run_article(article, seed=seed)]
    rows += [run_cellpipe(article, seed=seed, max_attempts=n)[0] for n in dict.fromkeys(tries)]
    return rows


def table(rows: list[Row]) -> list[str]:
    """What a person reads."""
    head = f"{'':24}{'done':>8}{'failed':>8}{'lost':>7}{'attempts':>10}{'mean':>9}{'p99':>9}"
    return [head] + [
        f"{row.name:24}{row.done:>8,}{row.failed:>8,}{row.lost:>7,}{row.attempts:>10,}"
        f"{row.mean_s:>7.2f} s{row.p99_s:>7.2f} s"
        for row in rows
    ]
