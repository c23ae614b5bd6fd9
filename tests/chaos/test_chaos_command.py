"""`cellpipe chaos` itself, small: a tiny model, real servers, a few faults of each kind."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.gguf_files import TinyModel, write_gguf
from tests.processes import CELLPIPE, cellpipe, environment
from tests.servers import load_servers_script
from tests.waiting import wait_until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(180)]


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", TinyModel(layers=4))


def chaos(
    tiny_gguf: Path, *options: str, settings: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, dict[str, object], str]:
    """Exit code, what --json printed, and what was told."""
    if missing := load_servers_script().missing_software(("rabbitmq", "redis")):
        pytest.skip(f"not installed: {missing}")
    result = cellpipe(
        "chaos", "--model", str(tiny_gguf), "--groups", "2", "--json", *options,
        settings={"CELLPIPE_CACHE_DIR": str(tiny_gguf.parent), **settings}, timeout_s=170,
    )  # fmt: skip
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout), result.stderr


def test_nothing_is_lost_while_workers_die_freeze_and_garbage_comes(tiny_gguf: Path) -> None:
    code, ledger, told = chaos(
        tiny_gguf, "--requests", "60", "--concurrency", "4", "--seed", "1",
        "--kill", "worker:1s", "--freeze", "worker:2s:1", "--frozen-for", "1s",
        "--garbage", "1s",
    )  # fmt: skip

    assert code == 0, told + json.dumps(ledger)
    assert ledger["accepted"] == ledger["completed"] == 60
    assert [ledger[name] for name in ("lost", "duplicated", "stuck", "wrong")] == [0, 0, 0, 0]
    assert ledger["num_leaked_keys"] == 0
    assert ledger["recovery"]["kill worker"]["num_faults"] >= 1  # type: ignore[index]


def test_sigterm_ends_all_that_it_started(tiny_gguf: Path, tmp_path: Path) -> None:
    if missing := load_servers_script().missing_software(("rabbitmq", "redis")):
        pytest.skip(f"not installed: {missing}")
    own_tmp = tmp_path / "of-this-run"  # inherited by all that it starts
    own_tmp.mkdir()
    settings = {"CELLPIPE_CACHE_DIR": str(tiny_gguf.parent), "TMPDIR": str(own_tmp)}
    command = [*CELLPIPE, "chaos", "--model", str(tiny_gguf), "--groups", "2", "--for", "100s"]
    with subprocess.Popen([*command, "--kill", "worker:50s"], env=environment(settings)) as run:
        try:
            # RabbitMQ, Redis, a scheduler and four workers are several processes more.
            wait_until(lambda: num_with(own_tmp) >= 8, "all are started", timeout_s=90)
            run.terminate()

            assert run.wait(60) == 143
        finally:
            run.kill()
    wait_until(lambda: num_with(own_tmp) == 0, "all have ended", timeout_s=20)


def num_with(folder: Path) -> int:
    """How many processes have a folder in their environment."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += str(folder).encode() in path.read_bytes()
    return found


def test_everything_is_killed_under_load_and_nothing_is_lost(tiny_gguf: Path) -> None:
    code, ledger, told = chaos(
        tiny_gguf, "--requests", "300", "--concurrency", "16", "--seed", "3",
        "--restart", "everything:2s:1",
    )  # fmt: skip

    assert code == 0, told + json.dumps(ledger)
    assert ledger["accepted"] == ledger["completed"] == 300
    assert [ledger[name] for name in ("lost", "duplicated", "stuck", "wrong")] == [0, 0, 0, 0]
    assert ledger["recovery"]["restart everything"]["num_faults"] == 1  # type: ignore[index]


def test_rolling_sigterm_under_load_loses_nothing(tiny_gguf: Path) -> None:
    code, ledger, told = chaos(
        tiny_gguf, "--requests", "120", "--concurrency", "4", "--seed", "2",
        "--stop", "worker:700ms", "--stop", "scheduler:3s", "--schedulers", "2",
    )  # fmt: skip

    assert code == 0, told + json.dumps(ledger)
    assert ledger["accepted"] == ledger["completed"] == 120
    assert ledger["recovery"]["stop worker"]["num_faults"] >= 2  # type: ignore[index]
    assert "died by itself" not in ledger["named"]  # type: ignore[operator]


def test_it_asks_for_a_time_and_follows_each_answer_to_its_end(tiny_gguf: Path) -> None:
    code, ledger, told = chaos(tiny_gguf, "--for", "3s", "--concurrency", "4")

    assert code == 0, told + json.dumps(ledger)
    assert ledger["accepted"] == ledger["completed"]
    assert ledger["completed"] >= 4  # type: ignore[operator]
    assert "requests for 3 s" in told


def test_it_runs_on_the_servers_of_a_cluster(
    tiny_gguf: Path, amqp_url: str, fresh_redis_url: str
) -> None:
    settings = {"CELLPIPE_AMQP_URL": amqp_url, "CELLPIPE_REDIS_URL": fresh_redis_url}

    code, ledger, told = chaos(
        tiny_gguf, "--cluster", "--requests", "12", "--kill", "worker:1s", settings=settings
    )

    assert code == 0, told + json.dumps(ledger)
    assert ledger["completed"] == 12


def test_servers_that_it_did_not_start_are_never_restarted() -> None:
    settings = {
        "CELLPIPE_AMQP_URL": "amqp://127.0.0.1:1/",
        "CELLPIPE_REDIS_URL": "redis://127.0.0.1:1/0",
    }

    result = cellpipe("chaos", "--cluster", "--restart", "broker:1s", settings=settings)

    assert result.returncode == 2
    assert "--cluster" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "options", [("--for", "10s", "--requests", "5"), ("--for", "2000m"), ("--for", "soon")]
)
def test_a_load_without_one_clear_end_is_refused(options: tuple[str, ...]) -> None:
    result = cellpipe("chaos", *options)

    assert result.returncode == 2
    assert "--for" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_fault_that_does_not_exist_is_refused_before_anything_starts() -> None:
    result = cellpipe("chaos", "--kill", "gateway:2s")

    assert result.returncode == 2
    assert "gateway" in result.stderr
    assert "Traceback" not in result.stderr
