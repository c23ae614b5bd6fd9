"""The faults that tests order are read strictly and act where they were told to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.faults import Action, Fault, Faults, Point, parse_faults
from shared.errors import ConfigError
from tests.rig import Rig
from tests.rig_model import GREEDY, prompt_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill@commit:3", Fault(Action.KILL, Point.COMMIT, nth=3)),
        ("kill@confirm", Fault(Action.KILL, Point.CONFIRM, nth=1)),
        ("freeze@publish:request_id=r-1", Fault(Action.FREEZE, Point.PUBLISH, request_id="r-1")),
        ("crash@compute:request_id=r,2", Fault(Action.CRASH, Point.COMPUTE, 2, "r")),
        ("hang@compute:group=1,seconds=4", Fault(Action.HANG, Point.COMPUTE, 1, "", 1, 4.0)),
        (" slow@compute:seconds=0.05 ", Fault(Action.SLOW, Point.COMPUTE, seconds=0.05)),
    ],
)
def test_an_order_is_read(text: str, expected: Fault) -> None:
    assert parse_faults(text) == [expected]


def test_orders_are_separated_by_semicolons() -> None:
    assert [f.point for f in parse_faults("kill@write:2; freeze@receive;")] == ["write", "receive"]


@pytest.mark.parametrize(
    "text",
    ["kill", "kill@", "@write", "burn@write", "kill@lunch", "kill@write:0", "kill@write:x",
     "kill@write:group=-1", "kill@write:request_id=", "slow@compute:seconds=nan",
     "kill@write:colour=red"],
)  # fmt: skip
def test_an_unknown_order_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="CELLPIPE_TEST_FAULTS"):
        parse_faults(text)


def test_without_the_variable_there_are_no_faults() -> None:
    assert Faults.from_environ({}) is None
    assert Faults.from_environ({"CELLPIPE_TEST_FAULTS": ""}) is None
    assert Faults.from_environ({"CELLPIPE_TEST_FAULTS": "kill@write"}) is not None


def acted(text: str, visits: list[tuple[Point, int, tuple[str, ...]]]) -> list[int]:
    """Which of the visits the orders acted at."""
    seen: list[int] = []
    number = 0

    def act(_: Fault) -> None:
        seen.append(number)

    faults = Faults(parse_faults(text), act=act)
    for number, visit in enumerate(visits):  # noqa: B007 (act reads it)
        faults.hit(*visit)
    return seen


def test_a_fault_acts_at_its_place_and_time() -> None:
    visits = [
        (Point.COMPUTE, 0, ("a",)),
        (Point.WRITE, 0, ("a",)),
        (Point.WRITE, 1, ("a", "b")),
        (Point.WRITE, 1, ("b",)),
    ]

    assert acted("kill@write", visits) == [1]
    assert acted("kill@write:2", visits) == [2]
    assert acted("kill@write:4", visits) == []
    assert acted("kill@write:group=1", visits) == [2]
    assert acted("kill@write:request_id=b", visits) == [2, 3]
    assert acted("kill@write:request_id=b,2", visits) == [3]
    assert acted("slow@write:seconds=1", visits) == [1, 2, 3]


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "last"),
    [
        (5, 12, ("commit", "publish", "write")),
        (16, 12, ("commit", "publish", "write")),
        # Rows that fill a page before the request ends: who shares it finds them.
        (16, 1, ("write", "commit", "publish")),
    ],
)
def test_a_step_passes_its_points_in_order(
    num_tokens: int, max_tokens: int, last: tuple[str, ...]
) -> None:
    seen: list[tuple[str, int]] = []
    every = ";".join(f"slow@{point}:group={g}" for g in (0, 1) for point in Point)
    faults = Faults(parse_faults(every), act=lambda f: seen.append((f.point, f.group or 0)))
    rig = Rig(2)
    rig.add_worker(0, 1, faults=faults)

    rig.start("r", prompt_of(num_tokens), replace(GREEDY, max_tokens=max_tokens))
    rig.run_until(lambda: len(rig.tokens("r")) == 1)

    assert seen == [
        *((point, 0) for point in ("receive", "compute", "publish", "write", "confirm")),
        *((point, 1) for point in ("receive", "compute", *last, "confirm")),
    ]


def test_a_file_orders_a_fault_once_each_time_it_appears(tmp_path: Path) -> None:
    order = tmp_path / "now"
    acted: list[Fault] = []
    faults = Faults(parse_faults(f"hang@compute:file={order}"), act=acted.append)

    faults.hit(Point.COMPUTE, 0, ["r"])
    assert acted == []
    for number in (1, 2):
        order.touch()
        faults.hit(Point.RECEIVE, 0, ["r"])
        faults.hit(Point.COMPUTE, 0, ["r"])
        faults.hit(Point.COMPUTE, 0, ["r"])

        assert len(acted) == number
        assert not order.exists()
