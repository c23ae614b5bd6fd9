"""Lets the simulator predict a run of `cellpipe chaos`, from one without faults. Only wires.

The run without faults says two numbers: how long a turn takes here, such that the simulated cluster
answers the same questions at the same rate, and what a worker takes of a core until it serves.
Everything else is given: cores, groups, workers, when which fault comes, and the policy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from services.chaos.schedule import FaultKind, faults_of
from services.simulator.load import Asked, Load
from services.simulator.simulation import Simulation
from services.simulator.world import Failures, Group, Host, Kill, WorkerSet, World
from shared.errors import ConfigError
from shared.local_cluster.processes import RESPAWN_S

if TYPE_CHECKING:
    from services.chaos.run import ChaosOptions
    from services.chaos.verdict import Verdict

READY_S = 3.0  # as chaos counts a worker that was just started
ROW_SHARE = 0.3  # of a turn's time that each further row adds: weights are read once a turn
MAX_KILLS_S = 3600.0
FIT_STEPS = 14
VARIATION = 0.3
CLOSE = 0.2


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tokens a second, measured and simulated, without faults and with them."""

    calm_measured: float
    calm_simulated: float
    measured: float
    simulated: float
    turn_s: float
    start_cpu_s: float
    kills_measured: int
    kills_simulated: int

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1.0 if self.measured else float("inf")

    @property
    def is_close(self) -> bool:
        return abs(self.error) <= CLOSE


def check_predictable(options: ChaosOptions) -> None:
    """Raise `ConfigError` for faults that the simulated cluster does not have."""
    for plan in options.faults:
        if plan.kind is not FaultKind.KILL or plan.target != "worker":
            raise ConfigError(
                f"--predict knows --kill worker alone, not --{plan.kind} {plan.target}"
            )
    if options.num_requests is None:
        raise ConfigError("--predict needs --requests: both runs are to answer the same questions")


def predict(options: ChaosOptions, calm: Verdict, run: Verdict) -> Prediction:
    """What the simulator says of the run with faults, given the one without."""
    load = Load(
        tuple(Asked(0.0, prompt, answer) for prompt, answer in calm.sizes),
        concurrency=options.concurrency,
    )
    if calm.start_cpu_s is None:
        raise ConfigError("--predict needs /proc: it asks what a process takes of a core to start")
    world = _world(options, calm.start_cpu_s)
    quiet = replace(world, failures=replace(world.failures, kills=()))
    turn_s = _fitted_turn_s(quiet, load, calm.tokens_per_s)
    simulated, num_kills = _rate(_with_turn(world, turn_s), load)
    return Prediction(
        calm_measured=calm.tokens_per_s,
        calm_simulated=_rate(_with_turn(quiet, turn_s), load)[0],
        measured=run.tokens_per_s,
        simulated=simulated,
        turn_s=turn_s,
        start_cpu_s=world.failures.start_cpu_s,
        kills_measured=sum(found.num_faults for found in run.recovery.values()),
        kills_simulated=num_kills,
    )


def table(found: Prediction) -> list[str]:
    """What a person reads."""
    return [
        "",
        f"{'tokens a second':22}{'measured':>10}{'simulated':>11}",
        f"{'without faults':22}{found.calm_measured:>10.1f}{found.calm_simulated:>11.1f}  fitted: "
        f"a turn of {found.turn_s * 1e3:.2f} ms, {found.start_cpu_s:.2f} s of a core to start",
        f"{'with them':22}{found.measured:>10.1f}{found.simulated:>11.1f}  {found.error:+.0%}",
        f"{'processes killed':22}{found.kills_measured:>10}{found.kills_simulated:>11}",
    ]


def _world(options: ChaosOptions, cpu_s: float) -> World:
    group = Group(turn_s=1.0, row_s=0.0, workers=(WorkerSet(options.workers_per_group),))
    kills = []
    for fault in faults_of(options.faults, options.seed):
        if fault.at_s > MAX_KILLS_S:
            break
        kills.append(Kill(fault.at_s, fault.draw))
    return World(
        groups=(group,) * options.num_groups,
        failures=Failures(
            kills=tuple(kills), restart_s=RESPAWN_S, start_cpu_s=cpu_s, ready_s=READY_S
        ),
        host=Host(cores=os.cpu_count() or 1),
        variation=VARIATION,
        name="chaos",
    )


def _with_turn(world: World, turn_s: float) -> World:
    groups = tuple(
        replace(group, turn_s=turn_s * (1.0 - ROW_SHARE), row_s=turn_s * ROW_SHARE)
        for group in world.groups
    )
    return replace(world, groups=groups)


def _rate(world: World, load: Load) -> tuple[float, int]:
    outcome = Simulation(world, load, horizon_s=1.0).run()
    figures = outcome.figures
    return figures.num_tokens / figures.last_end_s, figures.num_process_deaths


def _fitted_turn_s(world: World, load: Load, tokens_per_s: float) -> float:
    """The turn at which the simulated cluster is as fast as the real one. Raises `ConfigError`."""
    if tokens_per_s <= 0.0:
        raise ConfigError("--predict: the run without faults gave no tokens")
    low, high = 1e-6, 10.0
    for _ in range(FIT_STEPS):
        middle = (low * high) ** 0.5
        is_fast = _rate(_with_turn(world, middle), load)[0] > tokens_per_s
        low, high = (middle, high) if is_fast else (low, middle)
    return float((low * high) ** 0.5)
