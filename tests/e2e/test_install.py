"""`pip install .` without a C compiler gives a working, slower cellpipe that says so once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.gguf_files import write_gguf

ROOT = Path(__file__).parents[2]
COPIED = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "services", "shared")


def install(folder: Path) -> Path:
    """Install a copy of the project into a fresh venv; returns its `cellpipe` command."""
    source = folder / "source"
    source.mkdir()
    for name in COPIED:
        origin = ROOT / name
        if origin.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "_native*")
            shutil.copytree(origin, source / name, ignore=ignored)
        else:
            shutil.copyfile(origin, source / name)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    # cellpipe's own libraries come from where the tests run: this test is about the build.
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    done = subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--quiet", "."],
        cwd=source,
        env={**os.environ, "CC": "/nonexistent/cc"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    if "No matching distribution" in done.stderr and not os.environ.get("CI"):
        pytest.skip("the build's own requirements cannot be fetched")
    assert done.returncode == 0, done.stderr
    return folder / "venv" / "bin" / "cellpipe"


@pytest.mark.timeout(600)
def test_an_installation_without_a_compiler_computes_and_warns_once(tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "tiny.gguf")
    cellpipe = install(tmp_path)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("CELLPIPE_", "PYTHONPATH"))}
    environment = {**kept, "CELLPIPE_CACHE_DIR": str(tmp_path)}
    words = ["run", "hi", "--raw", "--model", str(model), "--max-tokens", "3", "--embedded"]

    result = subprocess.run(
        [cellpipe, *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )

    assert result.returncode == 0, result.stderr
    assert result.stderr.count("the C kernel is not built") == 1
    assert "Install a C compiler" in result.stderr
    assert "3 tokens" in result.stderr
