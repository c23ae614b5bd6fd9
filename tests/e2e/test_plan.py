"""`cellpipe plan` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes import cellpipe


@pytest.fixture
def elsewhere(tmp_path: Path) -> dict[str, str]:
    """Settings without a calibration of this machine."""
    return {"CELLPIPE_CACHE_DIR": str(tmp_path / "cache")}


def test_a_plan_is_told_in_tables(elsewhere: dict[str, str]) -> None:
    result = cellpipe("plan", "-m", "kimi-k2", "-p", "ps3:100000", settings=elsewhere)

    assert result.returncode == 0, result.stderr
    for title in ("Memory of a node", "The bill", "What breaks first", "Where a token's time goes"):
        assert title in result.stdout
    assert "153 million kWh" in result.stdout


def test_an_impossible_plan_ends_with_1_and_says_what_would_do(elsewhere: dict[str, str]) -> None:
    result = cellpipe("plan", "-p", "ps3:1000", "--json", settings=elsewhere)

    assert result.returncode == 1
    assert json.loads(result.stdout)["would_fit_with"][0]["add_nodes"]["ps3"] > 0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["-m", "gpt-9"], "no model 'gpt-9' is known; there is deepseek-v3"),
        (["-p", "ps3"], "--pool must be such as ps3:100000"),
        (["-p", "there-is-none.toml"], "there-is-none.toml cannot be read"),
        (["--bits", "5"], "--bits must be 4, 8 or 16, got 5"),
        (["--strategy", "luck"], "--strategy must be pipeline, tensor or expert, got 'luck'"),
        (["--network", "pigeon"], "no network 'pigeon' is known"),
        (["--prompt", "9999"], "--prompt must be in 1..4096"),
    ],
)
def test_wrong_usage_ends_with_2_and_one_line(
    options: list[str], why: str, elsewhere: dict[str, str]
) -> None:
    result = cellpipe("plan", *options, settings=elsewhere)

    assert result.returncode == 2
    assert why in result.stderr
    assert "Traceback" not in result.stderr


def test_a_file_may_hold_pool_and_model(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    file = tmp_path / "attic.toml"
    file.write_text('[pool]\nnetwork = "wifi"\nnodes = [{ hardware = "rpi5", count = 4 }]\n')

    result = cellpipe("plan", "-m", "smollm2-135m", "-p", str(file), "--json", settings=elsewhere)

    assert result.returncode == 0, result.stderr
    pool = json.loads(result.stdout)["pool"]
    assert pool == {"name": "attic", "nodes": {"rpi5": 4}, "network": "wifi",
                    "servers": "measured"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.real_model
def test_a_calibrated_machine_can_be_planned_for(tmp_path: Path) -> None:
    file = tmp_path / "this.toml"
    found = cellpipe("calibrate", "-o", str(file), "--rounds", "1", "--tokens", "8", "--json",
                     timeout_s=400)  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert len(json.loads(found.stdout)["measured"]["points"]) == 4

    result = cellpipe("plan", "-m", "smollm2-135m", "-p", "this:6", "--specs", str(file), "--json")

    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["pool"]["servers"] == "this"


def test_a_table_without_a_comparison_is_refused(elsewhere: dict[str, str]) -> None:
    result = cellpipe("calibrate", "--table", "docs/planning.md", settings=elsewhere)

    assert result.returncode == 2
    assert "--table goes with --compare" in result.stderr
