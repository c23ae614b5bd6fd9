"""A simulated run of chaos, fitted to one without faults."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.chaos.run import ChaosOptions
from services.chaos.schedule import FaultKind, FaultPlan
from services.chaos.verdict import Verdict
from services.cli.predicted_chaos import check_predictable, predict, table
from shared.errors import ConfigError

KILLS = FaultPlan(FaultKind.KILL, "worker", 2.0)
OPTIONS = ChaosOptions(model="tiny", faults=(KILLS,), num_requests=30)
CALM = Verdict(num_tokens=30 * 40, load_s=10.0, sizes=[(20, 40)] * 30, start_cpu_s=0.5)


def test_the_fitted_cluster_is_as_fast_as_the_real_one_without_faults() -> None:
    found = predict(OPTIONS, CALM, Verdict(num_tokens=1200, load_s=12.0))

    assert found.calm_measured == 120.0
    assert found.calm_simulated == pytest.approx(120.0, rel=0.02)
    assert found.measured == 100.0
    assert found.kills_simulated >= 3
    assert 20.0 < found.simulated < 120.0
    assert any("with them" in line for line in table(found))


def test_more_kills_and_longer_starts_make_it_slower() -> None:
    often = replace(OPTIONS, faults=(replace(KILLS, period_s=0.7),))
    slow_start = Verdict(num_tokens=1200, load_s=10.0, sizes=CALM.sizes, start_cpu_s=3.0)

    usual, more, slower = (
        predict(options, calm, CALM).simulated
        for options, calm in ((OPTIONS, CALM), (often, CALM), (OPTIONS, slow_start))
    )

    assert more < usual
    assert slower < usual


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (replace(OPTIONS, faults=(FaultPlan(FaultKind.FREEZE, "worker", 5.0),)), "--freeze worker"),
        (replace(OPTIONS, num_requests=None, duration_s=9.0), "--requests"),
    ],
)
def test_what_cannot_be_predicted_is_refused_by_name(options: ChaosOptions, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        check_predictable(options)
