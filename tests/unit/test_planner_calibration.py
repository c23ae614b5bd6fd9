"""From measurements to specs and back to predictions, with invented measurements."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.planner.calibration import (
    END,
    MANY,
    START,
    Measured,
    Point,
    Prediction,
    between_marks,
    calibration_toml,
    comparison,
    predict,
)
from services.planner.library import Library, builtin_library
from services.planner.specs import Pool
from shared.errors import ConfigError

POINTS = (  # a quiet machine's, about
    Point(1, 1, 87.0, 0.035, 0.0109, 0.0074, 0.0008, 0.0004, 0.0012, 1.0),
    Point(1, MANY, 330.0, 0.214, 0.0435, 0.0340, 0.0030, 0.0012, 0.0050, 14.0),
    Point(2, 1, 85.0, 0.034, 0.0118, 0.0036, 0.0009, 0.0004, 0.0012, 1.0),
    Point(2, MANY, 370.0, 0.220, 0.0390, 0.0150, 0.0040, 0.0010, 0.0060, 7.0),
)
MEASURED = Measured(
    cores=2, memory_bytes=16 << 30, read_bytes_per_s=14e9, peak_multiply_adds_per_s=200e9,
    broker_messages_per_s=6e3, broker_bytes_per_s=150e6, redis_operations_per_s=15e3,
    redis_bytes_per_s=2e8, redis_round_trip_s=5e-5, num_prompt=16, num_tokens=64, points=POINTS,
)  # fmt: skip


@pytest.fixture
def library(tmp_path: Path) -> Library:
    """With `this` as calibrated from the points above."""
    found = builtin_library()
    file = tmp_path / "calibration.toml"
    file.write_text(calibration_toml(MEASURED, found.model("smollm2-135m")))
    found.add_file(file)
    return found


def test_a_pool_of_this_machine_takes_what_was_measured_with_it(library: Library) -> None:
    pool = library.parse_pool("this:6")

    assert pool.network.name == "this"
    assert pool.servers.name == "this"
    assert pool.servers.broker_hop_s == POINTS[0].broker_s
    assert pool.nodes[0].node.host_cores == 2
    assert library.parse_pool("rpi5:6").servers.name == "measured"


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p.groups}x{p.streams}")
def test_what_it_was_calibrated_with_is_predicted(library: Library, point: Point) -> None:
    said = _predict(library, library.parse_pool(f"this:{point.groups}"), point)

    assert said.tokens_per_s == pytest.approx(point.tokens_per_s, rel=0.15)
    assert said.first_token_s == pytest.approx(point.first_token_s, rel=0.25)


def test_cores_that_all_share_bound_what_more_groups_bring(library: Library) -> None:
    rates = [
        _predict(library, library.parse_pool(f"this:{groups}"),
                 Point(groups, 64, 0, 0, 0, 0, 0, 0, 0, 0)).tokens_per_s
        for groups in (1, 2, 6)
    ]  # fmt: skip

    assert rates[2] < 3 * rates[0]  # six workers on two cores


def _predict(library: Library, pool: Pool, point: Point) -> Prediction:
    model = library.model("smollm2-135m")
    return predict(model, pool, point.groups, point.streams, num_prompt=16, num_tokens=64)


def test_the_comparison_says_how_far_off_each_is_and_the_median() -> None:
    said = [Prediction(p.groups, p.streams, 1.1 * p.tokens_per_s, 0.8 * p.first_token_s)
            for p in POINTS]  # fmt: skip

    lines = comparison(POINTS, said)

    assert lines[2] == "| 1 | 1 | 87 | 96 | +10% | 35 ms | 28 ms | -20% |"
    assert lines[-1] == "Off in the median: 10% in tok/s, 20% in the time to the first token."


def test_the_table_goes_between_its_marks_and_nowhere_else() -> None:
    text = f"before\n{START}\nold\n{END}\nafter"

    assert between_marks(text, ["new"], "a.md") == f"before\n{START}\nnew\n{END}\nafter"
    assert between_marks(between_marks(text, ["a"], "f"), ["new"], "f") == between_marks(
        text, ["new"], "f"
    )
    for bad in ("no marks", f"{END} {START}", START):
        with pytest.raises(ConfigError, match=r"a\.md has no place"):
            between_marks(bad, ["new"], "a.md")


def test_the_document_has_its_marks() -> None:
    document = Path(__file__).parents[2] / "docs" / "planning.md"

    between_marks(document.read_text(), [], str(document))
