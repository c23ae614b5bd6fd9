"""A private redis-server on a free loopback port, which a test may stop, restart and starve."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from shared.errors import StoreUnavailable
from shared.store.connection import connect


class RedisServer:
    """One server process; a restart keeps its port and loses its data."""

    def __init__(self, directory: Path) -> None:
        self.folder = directory
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            if os.environ.get("CI"):
                pytest.fail("redis-server is not installed")
            pytest.skip("redis-server is not installed")
        options = ["--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        self._process = subprocess.Popen(
            [binary, "--port", str(self.port), *options], stdout=subprocess.DEVNULL
        )
        stores = connect(self.url, timeout_s=1.0, max_retries=0)
        deadline = time.monotonic() + 10
        while True:
            try:
                stores.ping()
                break
            except StoreUnavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        stores.close()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
