"""Starts `cellpipe` commands as processes of their own and ends exactly those."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.store.connection import connect
from shared.store.shards import ShardStore
from tests.waiting import empty_step_queues

REPO = Path(__file__).parent.parent
CELLPIPE = [sys.executable, "-m", "services.cli"]


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without cellpipe settings, then `settings`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CELLPIPE_")}
    return {**kept, "PYTHONPATH": str(REPO), "COLUMNS": "200", **settings}


def cellpipe(
    *args: str, settings: Mapping[str, str] | None = None, cwd: Path = REPO, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [*CELLPIPE, *args],
        env=environment(settings or {}),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


class ProcessCluster:
    """Processes of a cluster; what still runs at the end is terminated, then killed, by pid."""

    def __init__(self, amqp_url: str, redis_url: str, log_folder: Path) -> None:
        self.settings = {"CELLPIPE_AMQP_URL": amqp_url, "CELLPIPE_REDIS_URL": redis_url}
        self._log_folder = log_folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *args: str, faults: str = "") -> subprocess.Popen[bytes]:
        """Start a command in the background; its output goes to a file of the log folder.

        `faults` are what `services/worker/faults.py` reads.
        """
        settings = self.settings | ({"CELLPIPE_TEST_FAULTS": faults} if faults else {})
        log = self._log_folder / f"{len(self._processes)}-{args[0]}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*CELLPIPE, *args],
                env=environment(settings),
                cwd=REPO,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)
        return process

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """All that were started."""
        return list(self._processes)

    def run(self, *args: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return cellpipe(*args, settings=self.settings, timeout_s=timeout_s)

    def load(self, model: Path, *, groups: int) -> None:
        """Put a model into Redis; its step queues are empty then, whoever used them before."""
        loaded = self.run("load", str(model), "--groups", str(groups))
        assert loaded.returncode == 0, loaded.stderr
        with closing(connect(self.settings["CELLPIPE_REDIS_URL"])) as stores:
            layout = ShardStore(stores.weights).active_layout("")
        empty_step_queues(self.settings["CELLPIPE_AMQP_URL"], layout)

    def status(self) -> dict[str, Any]:
        """What `cellpipe status --json` prints."""
        overview: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return overview

    def wait_until_serving(self, num_workers: int, *, timeout_s: float = 60) -> dict[str, Any]:
        """Wait until so many workers serve and nothing is missing; returns the status."""

        def is_serving(status: dict[str, Any]) -> bool:
            serving = [w for w in status["workers"] if w["state"] == "serving"]
            return len(serving) == num_workers and not status["problems"]

        return self.wait_until(is_serving, timeout_s=timeout_s)

    def wait_until(
        self, condition: Callable[[dict[str, Any]], bool], *, timeout_s: float = 60
    ) -> dict[str, Any]:
        """Wait until the status is as it should be; returns it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if condition(status):
                return status
            assert time.monotonic() < deadline_s, f"{status}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """Everything that the processes printed."""
        files = sorted(self._log_folder.glob("*.log"))
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')}" for f in files)

    def __enter__(self) -> ProcessCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        running = [process for process in self._processes if process.poll() is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
