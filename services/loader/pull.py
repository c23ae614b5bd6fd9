"""Gets a model by name or path. Owns the cache of catalog files; knows nothing of their content.

A file appears in the cache under its name only once its SHA-256 was right, by an atomic rename: a
file that is there is whole. Two pulls of one model at a time: the second waits for the first.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.loader.catalog import CATALOG, CatalogEntry, Source, find_entry
from services.loader.files import (
    Progress,
    StageProgress,
    file_sha256,
    no_progress,
    only_one,
    stage,
)
from services.loader.hub import find_pulled, pull_from_hub, pulled_models
from services.loader.hub_names import SCHEME, parse_hub_name
from services.loader.sources import SourceFailed, fetch
from shared.errors import ModelError
from shared.model_names import name_of, short_name

Fetcher = Callable[[Source, Path, Progress], Path]
"""Fetches one source into a folder, as `services.loader.sources.fetch` does."""


_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*\Z")


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that has a name here. `path` is None when it is not pulled yet."""

    name: str
    num_bytes: int
    path: Path | None


def known_models(cache_dir: Path) -> list[KnownModel]:
    """The catalog's models, and those that were pulled from the hub."""
    known = []
    for entry in CATALOG.values():
        cached = cache_dir / entry.filename
        is_here = _size(cached) == entry.num_bytes
        known.append(KnownModel(entry.name, entry.num_bytes, cached if is_here else None))
    for name, path in pulled_models(cache_dir).items():
        files = [path] if path.is_file() else list(path.iterdir())
        known.append(KnownModel(name, sum(_size(file) or 0 for file in files), path))
    return known


def default_cache_dir() -> Path:
    """Where model files are kept unless the configuration says otherwise."""
    return Path.home() / ".cache" / "cellpipe" / "models"


def is_path(name_or_path: str) -> bool:
    """Whether it names a file or a model folder rather than a model by name."""
    if name_or_path.startswith(SCHEME):
        return False
    path = Path(name_or_path).expanduser()
    if path.suffix.lower() == ".gguf" or path.is_file() or "/" in name_or_path:
        return True
    # A folder that merely is called as a model of the catalog is not meant.
    return (path / "config.json").is_file()


def resolve_model(
    name_or_path: str,
    cache_dir: Path,
    *,
    progress: StageProgress = no_progress,
    refresh: bool = False,
) -> Path:
    """The file or folder of a model: a path as it is; `hf:ORG/NAME`, and what the catalog has (by
    its name there, or its own name or id), from the cache, pulled first if it is not there; what
    was pulled from the hub also by its own name or id.

    With `refresh` the hub is asked whether a revision has moved on. Raises `ModelError` for an
    unknown name, a missing file, or a model that no source gives.
    """
    if name_or_path.startswith(SCHEME):
        name = parse_hub_name(name_or_path)
        pulled = None if refresh else find_pulled(name, cache_dir)
        return pulled or pull_from_hub(name, cache_dir, progress=progress)
    if is_path(name_or_path):
        path = Path(name_or_path).expanduser()
        if not path.exists():
            is_repo = _REPO.match(name_or_path)
            raise ModelError(
                f"there is no file {path}",
                remedy=f"for a model of the Hugging Face hub write {SCHEME}{name_or_path}"
                if is_repo
                else "check the path, or give a catalog name",
            )
        return path
    entry = find_entry(name_or_path)
    if entry is None:
        return _pulled_as(name_or_path, cache_dir)
    cached = cache_dir / entry.filename
    if _size(cached) == entry.num_bytes:
        return cached
    return pull(entry, cache_dir, progress=progress)


def _pulled_as(name: str, cache_dir: Path) -> Path:
    """The model of that own name, or id, among those that were pulled from the hub."""
    pulled = pulled_models(cache_dir)
    found = {path for path in pulled.values() if short_name(path.name) == name_of(name).lower()}
    if len(found) == 1:
        return found.pop()
    if found:
        raise ModelError(
            f"{name!r:.80} are several: "
            + ", ".join(text for text, path in pulled.items() if path in found),
            remedy="give one of them",
        )
    if Path(name).is_dir():
        raise ModelError(
            f"{name} is a folder without config.json, and no model of the catalog",
            remedy="give a model folder, as published on the Hugging Face hub",
        )
    there = f", pulled were: {', '.join(pulled)}" if pulled else ""
    raise ModelError(
        f"no model {name!r:.80} in the catalog; it has: {', '.join(sorted(CATALOG))}{there}",
        remedy="give one of these names, hf:ORG/NAME of the Hugging Face hub, or the path of a "
        ".gguf file or of a model folder",
    )


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


def _fetch_first(
    entry: CatalogEntry, staging: Path, progress: StageProgress, fetcher: Fetcher
) -> Path:
    """The verified file of the first source that gives it."""
    failures: list[str] = []
    for source in entry.sources:
        try:
            fetched = fetcher(source, staging, stage(progress, str(source)))
        except SourceFailed as error:
            failures.append(f"{source}: {error}")
            continue
        actual = file_sha256(fetched, stage(progress, "verify"))
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
    return file_sha256(path, stage(progress, "verify")) == entry.sha256


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
