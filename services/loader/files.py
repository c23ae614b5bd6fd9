"""What every pull shares: digests, locks between processes, and how progress is told."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

READ_BYTES = 1 << 20

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

StageProgress = Callable[[str, int, int], None]
"""Called with what is going on, and its bytes done and in all."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A `StageProgress` that shows nothing."""


def stage(progress: StageProgress, name: str) -> Progress:
    """The `Progress` of one stage."""
    return lambda done, total: progress(name, done, total)


def file_sha256(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    done, total = 0, path.stat().st_size
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
            done += len(piece)
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


def files_sha256(files: Sequence[Path]) -> str:
    """SHA-256 of one file; of several, that of the list that sha256sum would print of them."""
    if len(files) == 1:
        return file_sha256(files[0])
    lines = "".join(f"{file_sha256(path)}  {path.name}\n" for path in files)
    return hashlib.sha256(lines.encode()).hexdigest()


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold a lock file's lock; the system lets go of it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
