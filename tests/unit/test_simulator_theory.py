"""The simulator against queueing theory, where theory has exact answers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from services.simulator.draws import streams, turn_factors
from services.simulator.load import Asked, Load, Poisson
from services.simulator.simulation import Outcome, Simulation
from services.simulator.tiers import Tiers
from services.simulator.world import Group, Network, Rules, Tier, WorkerSet, World
from shared.policy import RedriveLimits

CLOSE = 0.02
TURN_S = 0.1
SEED = 0
# Steps are taken one at a time, by whoever of a group is free, and nobody drives them again.
PLAIN = Rules(
    is_sticky=False,
    max_batch_rows=1,
    max_in_flight=None,
    max_queued=1 << 40,
    redrive=RedriveLimits(redrive_after_s=1e9, max_redrive_after_s=1e9),
)


def run(
    num_workers: list[int],
    utilisation: float,
    num_requests: int,
    *,
    variation: float = 1.0,
    rules: Rules = PLAIN,
    is_exact: bool = True,
) -> Outcome:
    """Requests of one step through groups in a row, each at that utilisation."""
    groups = tuple(
        Group(turn_s=TURN_S * number, row_s=0.0, workers=(WorkerSet(number),))
        for number in num_workers
    )
    world = World(groups=groups, rules=rules, variation=variation)
    times = Poisson(utilisation / TURN_S).times(num_requests, streams(SEED)["arrivals"])
    load = Load(tuple(Asked(at_s, 1, 1) for at_s in times))
    return Simulation(world, load, horizon_s=times[-1], seed=SEED, is_exact=is_exact).run()


def erlang_c(num_servers: int, utilisation: float) -> float:
    """The probability that an arrival waits (Erlang, 1917)."""
    offered = num_servers * utilisation
    block = 1.0
    for number in range(1, num_servers + 1):
        block = offered * block / (number + offered * block)
    return block / (1.0 - utilisation * (1.0 - block))


def mm_c_s(num_servers: int, utilisation: float, turn_s: float = TURN_S) -> float:
    """Mean time in an M/M/c queue whose servers together take `turn_s` a request."""
    service_s = turn_s * num_servers
    return service_s + erlang_c(num_servers, utilisation) * turn_s / (1.0 - utilisation)


def drawn(outcome: Outcome, num_servers: int) -> tuple[float, float]:
    """Utilisation and seconds a request of one group, as they were drawn: most of what a mean time
    is off by is what these are off by."""
    figures = outcome.figures
    turn_s = figures.busy_total_s / figures.num_completed / num_servers
    return turn_s * figures.num_completed / figures.horizon_s, turn_s


@pytest.mark.parametrize(
    ("num_servers", "utilisation", "num_requests"),
    [
        (1, 0.3, 40_000),
        (1, 0.6, 80_000),
        (2, 0.6, 60_000),
        (5, 0.7, 60_000),
        pytest.param(1, 0.9, 4_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
        pytest.param(16, 0.9, 2_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_one_queue_takes_as_long_as_erlang_says(
    num_servers: int, utilisation: float, num_requests: int
) -> None:
    outcome = run([num_servers], utilisation, num_requests)

    assert outcome.figures.num_completed == num_requests
    expected_s = mm_c_s(num_servers, *drawn(outcome, num_servers))
    assert outcome.figures.whole_s.mean() == pytest.approx(expected_s, rel=CLOSE)
    assert outcome.utilisation == pytest.approx(utilisation, rel=CLOSE)


@pytest.mark.parametrize("num_workers", [[1, 1, 1, 1], [3, 1, 2]])
def test_queues_in_a_row_take_the_sum_of_theirs(num_workers: list[int]) -> None:
    """What leaves an M/M/c queue is a Poisson stream again (Burke, 1956)."""
    outcome = run(num_workers, 0.5, 50_000)

    expected_s = sum(mm_c_s(number, 0.5) for number in num_workers)
    assert outcome.figures.whole_s.mean() == pytest.approx(expected_s, rel=CLOSE)


def test_half_of_the_wait_is_left_where_turns_always_take_the_same() -> None:
    """Pollaczek and Khinchine: M/D/1 waits half as long as M/M/1."""
    outcome = run([1], 0.6, 60_000, variation=0.0)

    expected_s = TURN_S * (1.0 + 0.6 / (2.0 * (1.0 - 0.6)))
    assert outcome.figures.whole_s.mean() == pytest.approx(expected_s, rel=CLOSE)


def test_each_request_takes_exactly_what_lindleys_recursion_says() -> None:
    """One queue, one server: the end of each is its service after the later of arrival and the end
    of the one before (Lindley, 1952), for the very same draws."""
    num_requests = 5_000
    times = Poisson(0.8 / TURN_S).times(num_requests, streams(SEED)["arrivals"])
    factors = turn_factors(streams(SEED)["turns"], 1.0)
    expected, end_s = [], 0.0
    for at_s in times:
        end_s = max(end_s, at_s) + TURN_S * factors.one()
        expected.append(end_s - at_s)

    outcome = run([1], 0.8, num_requests)

    assert outcome.figures.whole_s == pytest.approx(np.array(expected), rel=1e-9)


def test_an_mm1_queues_times_are_exponential() -> None:
    outcome = run([1], 0.3, 60_000)

    times, mean_s = outcome.figures.whole_s, mm_c_s(1, 0.3)
    for share in (0.5, 0.9, 0.99):
        below = (times < -mean_s * math.log1p(-share)).mean()
        assert below == pytest.approx(share, abs=0.006)


def test_windows_of_many_steps_give_the_queue_that_single_events_give() -> None:
    sticky = replace(PLAIN, is_sticky=True)

    outcome = run([1, 1, 1], 0.5, 30_000, rules=sticky, is_exact=False)

    assert not outcome.is_exact
    assert outcome.figures.whole_s.mean() == pytest.approx(3 * mm_c_s(1, 0.5), rel=CLOSE)


def test_what_is_shared_waits_as_an_md1_queue() -> None:
    tiers = Tiers(Network(tiers=(Tier("switch", 10.0, units_per_message=1.0),)))
    arrivals = Poisson(7.0).times(100_000, streams(1)["arrivals"])

    waits = [tiers.delay(at_s, 1.0, 0.0) for at_s in arrivals]

    assert sum(waits) / len(waits) == pytest.approx(0.1 * 0.7 / (2 * 0.3), rel=CLOSE)
    assert tiers.utilisation(arrivals[-1])["switch"] == pytest.approx(0.7, rel=CLOSE)


def test_over_a_window_what_is_shared_waits_as_long_on_average() -> None:
    network = Network(tiers=(Tier("switch", 1000.0, units_per_message=1.0),))
    tiers = Tiers(network)

    waits = [tiers.delay_over(i, i + 1, 700.0, 0.0) for i in range(100)]

    assert sum(waits) / len(waits) == pytest.approx(0.001 * 0.7 / (2 * 0.3), rel=CLOSE)


def test_more_than_a_tier_carries_waits_longer_and_longer() -> None:
    tiers = Tiers(Network(tiers=(Tier("switch", 100.0, units_per_byte=1.0),)))

    waits = [tiers.delay_over(i, i + 1, 10.0, 150.0) for i in range(4)]

    assert waits == sorted(waits)
    assert waits[-1] >= 2.0  # two seconds' worth is left after four of 1.5 each
