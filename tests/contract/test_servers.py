"""infra/servers: it starts what is missing, and stops only what it started. Redis stands for both:
it starts in milliseconds."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.servers import REPOSITORY, load_servers_script

pytestmark = pytest.mark.servers


def run(data: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPOSITORY / "infra" / "servers"), *arguments, "--data", str(data)],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def data(redis_url: str, tmp_path: Path) -> Iterator[Path]:
    """A data folder with a blank in its name; its servers are stopped. (`redis_url` skips us.)"""
    folder = tmp_path / "data folder"
    yield folder
    run(folder, "down")


def test_up_prints_urls_that_answer(data: Path) -> None:
    done = run(data, "up", "--only", "redis")

    assert done.returncode == 0, done.stderr
    url = re.fullmatch(r"export CELLPIPE_REDIS_URL=(redis://127\.0\.0\.1:\d+/0)\n", done.stdout)
    assert url is not None
    with redis.Redis.from_url(url[1]) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_up_again_says_so_and_gives_the_same_url(data: Path) -> None:
    first = run(data, "up", "--only", "redis", "--json")

    again = run(data, "up", "--only", "redis", "--json")

    assert "already up" in again.stderr
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert json.loads(again.stdout)["processes"]["redis"]["pid"] > 0


def test_another_port_than_the_running_one_is_refused(data: Path) -> None:
    port = json.loads(run(data, "up", "--only", "redis", "--json").stdout)["redis_port"]

    done = run(data, "up", "--only", "redis", "--redis-port", str(port - 1))

    assert done.returncode == 2
    assert str(port) in done.stderr


def test_a_taken_port_is_named(data: Path, redis_url: str) -> None:
    taken = redis_url.rsplit(":", 1)[1].split("/")[0]

    done = run(data, "up", "--only", "redis", "--redis-port", taken)

    assert done.returncode == 1
    assert taken in done.stderr
    assert "Traceback" not in done.stderr


def test_status_tells_up_from_down(data: Path) -> None:
    before = run(data, "status", "--only", "redis")
    run(data, "up", "--only", "redis")

    during = run(data, "status", "--only", "redis")

    assert (before.returncode, during.returncode) == (3, 0)
    assert run(data, "status").returncode == 3  # RabbitMQ is not up


def test_down_stops_what_up_started_and_keeps_the_data(data: Path) -> None:
    url = json.loads(run(data, "up", "--only", "redis", "--json").stdout)["redis_url"]
    with redis.Redis.from_url(url) as client:
        client.set("kept", "yes")

    done = run(data, "down")

    assert done.returncode == 0
    assert "redis stopped" in done.stderr
    assert run(data, "status").returncode == 3
    again = json.loads(run(data, "up", "--only", "redis", "--json").stdout)["redis_url"]
    with redis.Redis.from_url(again) as client:
        assert client.get("kept") == b"yes"


def test_the_ports_of_last_time_are_taken_again_when_they_are_free(data: Path) -> None:
    def port_after(verb: str) -> tuple[int, str]:
        done = run(data, verb, "--only", "redis", "--json")
        return json.loads(done.stdout)["redis_port"], done.stderr

    first, _ = port_after("up")
    run(data, "down")
    again, _ = port_after("up")
    run(data, "down")
    with socket.create_server(("127.0.0.1", first)):
        meanwhile, told = port_after("up")

    assert again == first
    assert meanwhile != first
    assert f"port {first}" in told


def test_a_damaged_list_of_ports_is_none(data: Path) -> None:
    data.mkdir()
    (data / "ports.json").write_text('{"redis": "six"}')

    assert run(data, "up", "--only", "redis").returncode == 0


def test_env_prints_what_a_shell_takes_and_nothing_else(data: Path) -> None:
    before = run(data, "env", "--only", "redis")
    up = run(data, "up", "--only", "redis")

    during = run(data, "env", "--only", "redis")

    assert (before.returncode, before.stdout) == (3, "")
    assert "infra/servers up" in before.stderr
    assert (during.returncode, during.stdout, during.stderr) == (0, up.stdout, "")
    assert "export" not in run(data, "status", "--only", "redis").stdout


def test_a_pid_that_belongs_to_another_process_is_left_alone(data: Path) -> None:
    script = load_servers_script()
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        data.mkdir()
        recycled = {"pid": bystander.pid, "started_at": "1", "log": ""}
        state = {"processes": {"redis": recycled}, "redis_port": 1}
        (data / "servers.json").write_text(json.dumps(state))

        done = run(data, "down")

        assert "redis was not up" in done.stderr
        assert bystander.poll() is None
        assert script.started_at(bystander.pid) not in (None, "1")
    finally:
        bystander.communicate(b"\n")


def test_missing_software_is_one_message_with_what_to_install(data: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()

    done = run(data, "up", "--only", "redis", "--no-install", PATH=str(empty))

    assert done.returncode == 4
    for advice in ("apt-get install redis-server", "dnf install redis", "brew install redis"):
        assert advice in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_software_is_installed_when_that_is_allowed(data: Path, tmp_path: Path) -> None:
    machine = tmp_path / "machine"  # a PATH without Redis, whose apt-get knows it after an update
    machine.mkdir()
    real = shutil.which("redis-server")
    scripts = {
        "sudo": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
        "apt-get": f"""
            echo "$@" >> {machine}/calls
            case "$*" in
              *update*) {shutil.which("touch")} {machine}/lists ;;
              *install*) [ -e {machine}/lists ] && {shutil.which("ln")} -s {real} {machine}/ ;;
            esac""",
        "true": "exit 0",
    }
    for name, script in scripts.items():
        (machine / name).write_text(f"#!/bin/sh\n{script}\n")
        (machine / name).chmod(0o755)

    done = run(
        data, "up", "--only", "redis", "--json", PATH=str(machine), CELLPIPE_ALLOW_INSTALL="1"
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["up"] == {"redis": True}
    update, install = (machine / "calls").read_text().splitlines()
    assert "update" in update
    assert "install" in install
    assert "-y" in install
    assert "redis-server" in install


def test_a_server_that_dies_at_start_shows_its_log(data: Path) -> None:
    (data / "redis").mkdir(parents=True)
    (data / "redis" / "appendonlydir").write_text("a file where Redis wants a folder")

    done = run(data, "up", "--only", "redis")

    assert done.returncode == 1
    assert "ended while starting" in done.stderr
    assert "appendonlydir" in done.stderr
    assert "Traceback" not in done.stderr
