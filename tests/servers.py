"""Private servers for tests, started and stopped by the code of `infra/servers`.

A server that `make test` or CI offers by CELLPIPE_TEST_AMQP_URL / CELLPIPE_TEST_REDIS_URL is used
as it is. Without the software tests are skipped, but fail in CI: there it must be installed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
URL_VARIABLES = {
    "rabbitmq": "CELLPIPE_TEST_AMQP_URL",
    "redis": "CELLPIPE_TEST_REDIS_URL",
}


def load_servers_script() -> ModuleType:
    """`infra/servers` as a module: it has no suffix and no package."""
    loader = SourceFileLoader("cellpipe_servers", str(REPOSITORY / "infra" / "servers"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


class PrivateServers:
    """RabbitMQ and Redis in a temporary folder; each starts when it is first asked for."""

    def __init__(self) -> None:
        self._script = load_servers_script()
        # Not pytest's tmp_path: it is kept after the run, and a data folder is large.
        self._folder = Path(tempfile.mkdtemp(prefix="cellpipe-test-"))

    def url(self, service: str) -> str:
        """Start "rabbitmq" or "redis" unless it is up. The port stays over a restart."""
        missing = self._script.missing_software((service,))
        if missing:
            reason = f"{service} is not installed: infra/servers up --allow-install"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
        state = self._script.read_state(self._folder)
        ports = {service: state.get(f"{service}_port", 0)}
        state = self._script.up(
            self._folder, ports=ports, services=(service,), report=lambda _: None
        )
        return str(state["amqp_url" if service == "rabbitmq" else "redis_url"])

    def kill(self, service: str) -> None:
        """End it as a power cut would; `url` starts it again on its data and port."""
        state = self._script.read_state(self._folder)
        self._script.stop(state["processes"][service], kill=True)

    def restart_with(self, service: str, setting: str, *, advanced: str = "") -> None:
        """Kill it and start it with one more setting in its configuration, on its data and port.

        `advanced` are Erlang terms for RabbitMQ's advanced.config.
        """
        infra = self._folder / "infra"
        shutil.copytree(REPOSITORY / "infra", infra, dirs_exist_ok=True)
        file = infra / f"{service}.conf"
        file.write_text(f"{file.read_text()}\n{setting}\n")
        self.kill(service)
        if advanced:
            (self._folder / service / "advanced.config").write_text(f"{advanced}.\n")
        self._script.INFRA = infra
        self.url(service)

    def log_bytes(self) -> int:
        """Length of Redis's append-only file."""
        return self._log_file().stat().st_size

    def cut_log(self, num_bytes: int) -> None:
        """Cut the append-only file of the killed Redis, as a machine that dies loses what was not
        on the disk."""
        os.truncate(self._log_file(), num_bytes)

    def _log_file(self) -> Path:
        files = (self._folder / "redis" / "appendonlydir").glob("*.incr.aof")
        return max(files, key=lambda file: file.stat().st_mtime)

    def pid(self, service: str) -> int:
        return int(self._script.read_state(self._folder)["processes"][service]["pid"])

    def limit_queue(self, queue: str, **limits: int) -> None:
        """Bound a queue that exists more tightly than it was declared, as an operator may.

        `limits` are keys of a policy with "_" for "-"; none take the policy away.
        """
        if not limits:
            self._rabbitmqctl("clear_policy", "limit")
            return
        definition = json.dumps({key.replace("_", "-"): value for key, value in limits.items()})
        pattern = "^" + queue.replace(".", "[.]") + "$"
        self._rabbitmqctl("set_policy", "limit", pattern, definition, "--apply-to", "queues")
        deadline_s = time.monotonic() + 30
        while f"{queue}\tlimit" not in self._rabbitmqctl("-q", "list_queues", "name", "policy"):
            assert time.monotonic() < deadline_s, f"the policy does not reach {queue}"

    def _rabbitmqctl(self, *arguments: str) -> str:
        """Its node is found by the node's own environment."""
        server = self._script.find_rabbitmq()
        node = Path(f"/proc/{self.pid('rabbitmq')}/environ")
        if not node.exists():
            pytest.skip("policies are set by way of /proc")
        pairs = (entry.partition("=") for entry in node.read_text().split("\0") if entry)
        done = subprocess.run(
            [str(server.resolve().parent / "rabbitmqctl"), *arguments],
            env={name: value for name, _, value in pairs},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def freeze(self, service: str) -> None:
        self._signal(service, signal.SIGSTOP)

    def thaw(self, service: str) -> None:
        self._signal(service, signal.SIGCONT)

    def close(self) -> None:
        self._script.down(self._folder, kill=True, report=lambda _: None)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, service: str, signum: signal.Signals) -> None:
        os.kill(self.pid(service), signum)
