"""What a person or a script meets at the command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.cli.app import PANELS
from tests.gguf_files import write_gguf
from tests.hf_folders import write_folder
from tests.processes import CELLPIPE, REPO, cellpipe, environment


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[str, dict[str, str]]:
    """A tiny model's path, and settings with a cache of its own."""
    path = write_gguf(tmp_path / "tiny.gguf")
    return str(path), {"CELLPIPE_CACHE_DIR": str(tmp_path / "cache")}


@pytest.mark.parametrize(
    "options",
    [
        ["-n", "0"],
        ["-t", "-1"],
        ["--top-k", "-1"],
        ["--top-p", "2"],
        ["--top-p", "0"],
        ["--seed", "-1"],
        ["--timeout", "0"],
        ["--min-p", "1.1"],
        ["--frequency-penalty", "3"],
        ["--repetition-penalty", "0"],
        ["--logit-bias", "40"],
        ["--logit-bias", "40=101"],
        ["--logprobs", "2"],
        ["--raw", "--system", "be brief"],
    ],
)
def test_wrong_usage_is_exit_code_2(options: list[str]) -> None:
    result = cellpipe("run", "hello", *options)

    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_help_names_every_command_once_in_groups() -> None:
    shown = cellpipe("--help").stdout

    for panel, names in PANELS.items():
        assert panel in shown
        for name in names:
            assert len(re.findall(rf"^│ {name} ", shown, re.MULTILINE)) == 1, name
    assert "Example: cellpipe run" in shown
    assert "Example: " in cellpipe("dead").stdout + cellpipe("dead", "--help").stdout


def test_an_empty_prompt_is_refused() -> None:
    assert cellpipe("run", "  ").returncode == 2


def test_standard_input_that_is_not_utf8_is_refused_in_one_line() -> None:
    result = subprocess.run(
        [*CELLPIPE, "run", "-"], input=b"caf\xe9", env=environment({}), cwd=REPO,
        capture_output=True, check=False,
    )  # fmt: skip

    assert result.returncode == 2
    assert b"UTF-8" in result.stderr
    assert b"Traceback" not in result.stderr


def test_the_answer_alone_goes_to_standard_output(tiny: tuple[str, dict[str, str]]) -> None:
    path, settings = tiny

    result = cellpipe("run", "--model", path, "--raw", "hello", "-n", "3", settings=settings)

    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("\n")
    assert "3 tokens" in result.stderr or "finish: stop" in result.stderr
    assert "request_started" not in result.stderr, "logs have no place in an answer"


def test_a_sampled_answer_can_be_repeated_from_what_was_shown(
    tiny: tuple[str, dict[str, str]],
) -> None:
    path, settings = tiny
    common = ["run", "--model", path, "--raw", "hello", "-n", "8", "-t", "1.5", "--json"]
    first = json.loads(cellpipe(*common, settings=settings).stdout)

    again = json.loads(cellpipe(*common, "--seed", str(first["seed"]), settings=settings).stdout)

    assert again["token_ids"] == first["token_ids"]


def test_a_bias_and_log_probabilities_are_options_too(tiny: tuple[str, dict[str, str]]) -> None:
    path, settings = tiny

    result = cellpipe(
        "run", "--model", path, "--raw", "hello", "-n", "4", "--json", "--logprobs", "2",
        "--logit-bias", "40=100", "--logit-bias", "41=-5", "--presence-penalty", "0.5",
        settings=settings,
    )  # fmt: skip

    answer = json.loads(result.stdout)
    assert answer["token_ids"] == [40] * 4
    assert [len(entry["top_logprobs"]) for entry in answer["logprobs"]] == [2] * 4


def test_a_dry_run_that_fits_no_worker_fails_and_says_what_would_fit(
    tiny: tuple[str, dict[str, str]],
) -> None:
    model, settings = tiny

    fits = cellpipe("load", model, "--dry-run", settings=settings)
    small = cellpipe("load", model, "--dry-run", "--memory", "80MiB", settings=settings)
    as_json = cellpipe("load", model, "--dry-run", "--memory", "80MiB", "--json", settings=settings)

    assert (fits.returncode, small.returncode, as_json.returncode) == (0, 1, 1)
    assert "fits 256MiB" in fits.stdout
    assert "90 MB that its process takes" in fits.stdout
    assert "workers with --memory 86MiB" in small.stderr
    assert "--groups" not in small.stderr  # no number of them would do
    assert json.loads(as_json.stdout)["groups_that_fit"] is None


def test_a_folder_of_hugging_face_runs_and_one_that_cannot_is_refused_before_it_is_packed(
    tmp_path: Path,
) -> None:
    folder = write_folder(tmp_path / "Tiny", architectures=["Qwen3ForCausalLM"])
    settings = {"CELLPIPE_CACHE_DIR": str(tmp_path / "cache")}

    result = cellpipe(
        "run", "--model", str(folder), "--raw", "hello", "-n", "3", "--json", settings=settings
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    (tmp_path / "cache").rename(tmp_path / "gone")
    refused = cellpipe("load", str(folder), "--dry-run", settings=settings)

    assert json.loads(result.stdout)["model"].startswith("tiny@")
    assert refused.returncode == 1
    assert "num_experts: mixtures of experts are not supported" in refused.stderr
    assert not list((tmp_path / "cache").rglob("*.shard"))


def test_a_full_disk_is_said_in_one_line(tiny: tuple[str, dict[str, str]]) -> None:
    path, settings = tiny
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [*CELLPIPE, "run", "--model", path, "--raw", "hello", "-n", "3"],
            env=environment(settings), cwd=REPO, stdout=full, stderr=subprocess.PIPE, check=False,
        )  # fmt: skip

    assert result.returncode == 1
    assert b"Traceback" not in result.stderr


def test_ctrl_c_while_starting_is_quiet() -> None:
    for delay_s in (0.15, 0.3):
        process = subprocess.Popen(
            [*CELLPIPE, "status"], env=environment({}), cwd=REPO,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)

        assert b"services/cli" not in stderr, stderr.decode()


def test_respawn_brings_a_killed_command_back_and_passes_sigterm_on(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"import os,time; open({str(pids)!r},'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    respawn = subprocess.Popen([REPO / "infra" / "respawn", sys.executable, "-c", script])
    try:
        first = _nth_line(pids, 1)
        os.kill(first, signal.SIGKILL)
        second = _nth_line(pids, 2)
        assert second != first

        respawn.send_signal(signal.SIGTERM)

        assert respawn.wait(timeout=10) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(second, 0)
    finally:
        if respawn.poll() is None:
            respawn.kill()


def test_respawn_leaves_alone_what_has_left_and_does_not_end_the_others() -> None:
    script = "print('started', flush=True)"
    respawn = subprocess.Popen(
        [REPO / "infra" / "respawn", sys.executable, "-c", script],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert respawn.stderr is not None
        told = respawn.stderr.readline()  # after the command has ended
        assert "not started again" in told
        assert respawn.poll() is None  # a Procfile runner would end the rest

        respawn.send_signal(signal.SIGTERM)

        stdout, _ = respawn.communicate(timeout=20)  # nothing that it started holds its output
        assert (respawn.returncode, stdout) == (0, "started\n")
    finally:
        if respawn.poll() is None:
            respawn.kill()


def _nth_line(path: Path, number: int) -> int:
    deadline_s = time.monotonic() + 20
    while True:
        lines = path.read_text().split() if path.exists() else []
        if len(lines) >= number:
            return int(lines[number - 1])
        assert time.monotonic() < deadline_s, f"{path} has {len(lines)} lines"
        time.sleep(0.02)
