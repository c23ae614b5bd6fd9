"""`cellpipe simulate` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SMALL = (
    "--model", "llama-3.1-8b", "--pool", "ps3:300", "--hours", "0.05", "--requests", "40",
    "--answer", "8", "--prompt", "16",
)  # fmt: skip


def simulate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "simulate", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "CELLPIPE_CACHE_DIR": str(cwd)},
    )


def test_a_plan_is_simulated_twice_to_the_same_bytes_and_loses_nothing(tmp_path: Path) -> None:
    arguments = (*SMALL, "--failures", "2", "--seed", "4", "--json")

    first, second = (simulate(*arguments, cwd=tmp_path) for _ in range(2))

    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    seen = json.loads(first.stdout)
    assert seen["requests"]["lost"] == 0
    assert seen["requests"]["completed"] + seen["requests"]["failed"] == 40
    assert seen["node_failures"] > 0


def test_a_trace_is_played_and_a_page_drawn(tmp_path: Path) -> None:
    trace, page = tmp_path / "trace.csv", tmp_path / "run.html"
    trace.write_text("at_s,prompt,answer\n0,8,4\n1.5,8,4\n")
    drawn = ("--html", str(page)) if find_spec("matplotlib") else ()

    ended = simulate(*SMALL[:6], "--trace", str(trace), *drawn, cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr
    assert "nothing lost" in ended.stdout
    assert not drawn or "data:image/png;base64," in page.read_text()


def test_the_articles_world_is_shown_beside_ours(tmp_path: Path) -> None:
    ended = simulate("--article", "--requests", "1000", "--json", cwd=tmp_path)

    assert ended.returncode == 0, ended.stderr
    names = {row["name"]: row["lost"] for row in json.loads(ended.stdout)}
    assert names.keys() == {"the article", "cellpipe, 3 attempts", "cellpipe, 4 attempts"}
    assert names["cellpipe, 3 attempts"] == names["cellpipe, 4 attempts"] == 0


@pytest.mark.parametrize(
    ("arguments", "exit_code", "named"),
    [
        (("--hours", "-1"), 2, "--hours must be in 0.0001..744, got -1"),
        (("--requests", "5", "--rate", "2"), 2, "--requests 5 and --rate 2"),
        (("--resize", "soon:5"), 2, "--resize must be TIME:NODES such as 20m:+1000, got 'soon:5'"),
        (("--spares", "300", "--pool", "ps3:300"), 2, "--spares must leave nodes that work"),
        (("--pool", "ps3:2"), 1, ""),
        (("--trace", "nowhere.csv"), 2, "--trace nowhere.csv cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(
    arguments: tuple[str, ...], exit_code: int, named: str, tmp_path: Path
) -> None:
    ended = simulate(*arguments, cwd=tmp_path)

    assert ended.returncode == exit_code, ended.stderr
    assert named in ended.stderr
    assert ended.stderr.strip()
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--article", "--bits", "8"), "--bits does nothing there"),
        (("--growth", "10,20", "--failures", "1"), "takes no --failures"),
        ((*SMALL, "--resize", "1m:1000000000000"), "--resize must be"),
        ((*SMALL[:6], "--requests", "1000000000000"), "10,000,000 requests in all"),
        ((*SMALL[:6], "--prompt", "5000"), "must fit --context 4096"),
    ],
)
def test_what_would_do_nothing_or_too_much_is_refused(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    ended = simulate(*arguments, cwd=tmp_path)

    assert ended.returncode == 2, ended.stdout
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("row", "option", "said"),
    [
        ("1,1.5,4", (), "prompt must be a whole number, got '1.5'"),
        ("1,5000,4", (), "at most 4,096 tokens"),
        ("99999,5,4", (), "after the end"),
        ("1,5,4", ("--burst", "3"), "--burst does nothing"),
    ],
)
def test_a_trace_that_cannot_be_played_whole_is_refused(
    row: str, option: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"at_s,prompt,answer\n{row}\n")

    ended = simulate(*SMALL[:6], "--trace", str(trace), *option, cwd=tmp_path)

    assert ended.returncode == 2, ended.stdout
    assert said in ended.stderr


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="draws with matplotlib")
@pytest.mark.parametrize("option", ["--plot", "--html"])
def test_a_file_that_cannot_be_written_is_one_line(option: str, tmp_path: Path) -> None:
    ended = simulate(*SMALL, option, str(tmp_path), cwd=tmp_path)

    assert ended.returncode == 2
    assert f"{tmp_path} cannot be written" in ended.stderr
    assert "Traceback" not in ended.stderr
