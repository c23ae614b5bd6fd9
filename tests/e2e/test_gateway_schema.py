"""Whatever the OpenAPI document allows, and much that it does not, is no fault of the server."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api_server import ApiServer
from tests.gguf_files import TinyModel, write_gguf


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schemathesis_finds_no_fault_of_the_server(tmp_path: Path) -> None:
    """Five minutes; `pip install cellpipe[fuzz]` brings the tool."""
    tool = shutil.which("st", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        pytest.skip("schemathesis is not installed")
    model = write_gguf(tmp_path / "tiny.gguf", TinyModel(context=2048))
    with ApiServer(
        "serve", "--model", str(model), "--threads", "1",
        settings={"CELLPIPE_CACHE_DIR": str(tmp_path / "cache")}, log=tmp_path / "server.log",
    ) as server:  # fmt: skip
        done = subprocess.run(
            [tool, "run", f"{server.url}/openapi.json", "--url", server.url,
             "--checks", "not_a_server_error", "--max-examples", "60", "--request-timeout", "60"],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=840,
        )  # fmt: skip

    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
