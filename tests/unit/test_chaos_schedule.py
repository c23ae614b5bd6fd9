"""Faults come when the plan and the seed say so."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.chaos.schedule import FaultKind, FaultPlan, faults_of, parse_fault
from shared.config import parse_duration
from shared.errors import ConfigError

KILLS = FaultPlan(FaultKind.KILL, "worker", 2.0)
RESTARTS = FaultPlan(FaultKind.RESTART, "broker", 30.0, max_times=1)


def test_the_same_seed_repeats_the_schedule() -> None:
    first = list(islice(faults_of([KILLS, RESTARTS], seed=3), 50))

    again = list(islice(faults_of([KILLS, RESTARTS], seed=3), 50))
    other = list(islice(faults_of([KILLS, RESTARTS], seed=4), 50))

    assert first == again
    assert first != other


@given(seed=st.integers(0, 2**32), period_s=st.floats(0.1, 100.0))
def test_faults_come_in_order_and_about_once_a_period(seed: int, period_s: float) -> None:
    plans = [FaultPlan(FaultKind.KILL, "worker", period_s), RESTARTS]

    faults = list(islice(faults_of(plans, seed), 40))

    assert [f.at_s for f in faults] == sorted(f.at_s for f in faults)
    kills = [f for f in faults if f.kind is FaultKind.KILL]
    for number, fault in enumerate(kills, 1):
        assert abs(fault.at_s - number * period_s) <= 0.25 * period_s * 1.001
    assert all(0.0 <= fault.draw < 1.0 for fault in faults)


def test_a_fault_with_a_count_comes_so_often_and_no_more() -> None:
    plan = FaultPlan(FaultKind.FREEZE, "worker", 1.0, max_times=2)

    assert len(list(faults_of([plan], seed=0))) == 2


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        (FaultKind.KILL, "worker:2s", KILLS),
        (FaultKind.RESTART, "broker:30s:1", RESTARTS),
        (FaultKind.FREEZE, "scheduler:1.5m", FaultPlan(FaultKind.FREEZE, "scheduler", 90.0)),
        (FaultKind.GARBAGE, "500ms", FaultPlan(FaultKind.GARBAGE, "queue", 0.5)),
        (FaultKind.HANG, "15s:2", FaultPlan(FaultKind.HANG, "worker", 15.0, 2)),
        (FaultKind.HANG, "worker:15", FaultPlan(FaultKind.HANG, "worker", 15.0)),
    ],
)
def test_an_option_says_target_period_and_times(
    kind: FaultKind, text: str, expected: FaultPlan
) -> None:
    assert parse_fault(kind, text) == expected


@pytest.mark.parametrize(
    "text", ["", "worker", "gateway:2s", "worker:", "worker:2s:0", "worker:2s:1:1", "2s", ":2s"]
)
def test_an_option_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--kill"):
        parse_fault(FaultKind.KILL, text)


@pytest.mark.parametrize("text", ["", "0s", "-1s", "nan", "25h", "s", "1e9s", "100000s"])
def test_a_time_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="--patience"):
        parse_duration(text, field="--patience")
