"""What `dead list` and `dead show` make of a letter: nothing stands for what is not known."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from services.cli import operate
from services.cli.tree import app
from shared.dead_letters import DeadLetter
from shared.dead_queue import Letter


class Letters:
    def __init__(self, *found: Letter) -> None:
        self.found = found

    def __enter__(self) -> Letters:
        return self

    def __exit__(self, *_: object) -> None: ...

    def letters(self) -> list[Letter]:
        return list(self.found)


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> Letters:
    hour_ago_ms = time.time_ns() // 1_000_000 - 3_700_000
    history = DeadLetter(
        "killed 3 workers", group=0, attempts=3, workers=("a", "b"), died_unix_ms=hour_ago_ms
    )
    found = Letters(
        Letter("0a", "step", "r-1", 9, 0, 4, history=history),
        Letter("0b", "garbage", "", 8, problem="not a frame"),
    )
    monkeypatch.setattr(operate, "_dead_letters", lambda: found)
    return found


def run(*arguments: str) -> list[str]:
    result = CliRunner().invoke(app, ["dead", *arguments])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_the_list_tells_how_old_a_letter_is(letters: Letters) -> None:
    known, unknown = run("list")

    assert "1 h ago" in known
    assert "ago" not in unknown
    assert unknown.endswith("not a frame")


def test_rows_of_the_history_are_readable_and_empty_ones_are_left_out(letters: Letters) -> None:
    rows = [row.split(maxsplit=1)[1] for row in run("show", "0a") if row.startswith("history")]

    assert rows[:2] == ["reason: killed 3 workers", "group: 0"]
    assert "workers: a, b" in rows
    assert "1 h ago" in rows[-1]
    assert not any(row.startswith("history") for row in run("show", "0b"))
