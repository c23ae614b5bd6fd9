"""Pulls models of the Hugging Face hub into the cache. Owns the folder of what was pulled.

A folder appears in the cache under its commit by one rename, once every file in it had the digest
that the hub lists and could be opened: what is there is whole. What was fetched before a pull broke
off is kept, and the next pull goes on from there.

    hub/ORG/COMMIT/NAME/...        the files
    hub/ORG/refs/NAME@REVISION     the commit that a revision was when it was pulled last
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.loader.files import READ_BYTES, Progress, StageProgress, no_progress, only_one, stage
from services.loader.hub_names import (
    HubFile,
    HubListing,
    HubName,
    gguf_file,
    local_name,
    parse_hub_name,
    text_files,
    weight_files,
)
from services.loader.sources import SourceFailed, fetch_hub_files, list_hub
from shared.errors import ModelError
from shared.formats.gguf_file import open_gguf
from shared.formats.safetensors_file import INDEX_FILE, open_folder, shard_names

HUB_FOLDER = "hub"
SPARE_BYTES = 64 << 20  # of the disk, left free


@dataclass(frozen=True, slots=True)
class Hub:
    """How the hub is reached; tests have their own."""

    list_files: Callable[[str, str], HubListing] = list_hub
    fetch: Callable[[str, str, Sequence[HubFile], Path, Progress], None] = fetch_hub_files


def find_pulled(name: HubName, cache_dir: Path) -> Path | None:
    """Where a model lies that was pulled before: its file, or its folder. Asks no network."""
    try:
        commit = _ref(name, cache_dir).read_text().strip()
    except OSError:
        return None
    return _whole(name, commit, cache_dir) if commit.isalnum() else None


def pull_from_hub(
    name: HubName, cache_dir: Path, *, progress: StageProgress = no_progress, hub: Hub | None = None
) -> Path:
    """Put a model of the hub into the cache, verified, and return its file or folder.

    Raises `ModelError` when the hub cannot be reached or has no such model, when the repository has
    no weights that are safe to open, and when a file is not what the hub says it is.
    """
    hub = hub or Hub()
    try:
        listing = hub.list_files(name.repo, name.revision)
    except SourceFailed as error:
        raise ModelError(
            f"{name} cannot be had: {error}",
            remedy="check the name and the network; HF_TOKEN opens gated models, HF_ENDPOINT names "
            "a mirror",
        ) from error
    try:
        base = cache_dir / HUB_FOLDER / name.org
        (base / listing.commit).mkdir(parents=True, exist_ok=True)
        _ref(name, cache_dir).parent.mkdir(exist_ok=True)
        with only_one(base / listing.commit / f".lock-{name.name}"):
            path = _whole(name, listing.commit, cache_dir)
            if path is None:
                path = _fetch(name, listing, cache_dir, progress, hub)
            _ref(name, cache_dir).write_text(listing.commit)
    except OSError as error:
        raise ModelError(
            f"the model cache {cache_dir} cannot be written: {error}",
            remedy="free some space, or set CELLPIPE_CACHE_DIR to a folder that can be written",
        ) from error
    return path


def pulled_models(cache_dir: Path) -> dict[str, Path]:
    """Every whole model that was pulled from the hub, by the name it was pulled under."""
    found: dict[str, Path] = {}
    for ref in sorted((cache_dir / HUB_FOLDER).glob("*/refs/*@*")):
        repo, _, revision = ref.name.rpartition("@")
        org = ref.parent.parent.name
        try:
            folder = ref.parent.parent / ref.read_text().strip() / repo
            ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        except OSError:
            continue
        whole = f"hf:{org}/{repo}@{revision.replace('%2F', '/')}"
        for text in (whole, *(f"{whole}:{file}" for file in ggufs)):
            name = parse_hub_name(text)
            path = find_pulled(name, cache_dir)
            if path and path not in found.values():
                found[str(name)] = path
    return found


def _fetch(
    name: HubName, listing: HubListing, cache_dir: Path, progress: StageProgress, hub: Hub
) -> Path:
    folder = _folder(name, listing.commit, cache_dir)
    staging = folder.parent / f".partial-{name.name}"
    staging.mkdir(exist_ok=True)

    def get(files: Sequence[HubFile]) -> None:
        total = sum(file.num_bytes for file in files)
        _require_space(staging, total)
        try:
            hub.fetch(name.repo, listing.commit, files, staging, stage(progress, str(name)))
        except SourceFailed as error:
            raise ModelError(
                f"{name} was not fetched to its end: {error}",
                remedy="pull it again: it goes on where it stopped",
            ) from error
        done = 0
        for file in files:
            _verify(name, file, staging / file.path)
            done += file.num_bytes
            progress("verify", done, total)

    if name.file:
        wanted = [gguf_file(name, listing)]
        get(wanted)
    else:
        wanted = text_files(listing)
        if not any(file.path == "config.json" for file in wanted):
            weight_files(name, listing, None)  # says what there is instead
            raise ModelError(f"{name} has no config.json", remedy="give a model repository")
        has_index = INDEX_FILE in listing.files
        if not has_index:
            wanted += weight_files(name, listing, None)
        get(wanted)
        if has_index:
            shards = weight_files(name, listing, shard_names(staging))
            get(shards)
            wanted += shards
    _require_readable(staging, wanted, is_folder=name.file is None)
    return _publish(wanted, staging, folder, is_folder=name.file is None)


def _publish(files: Sequence[HubFile], staging: Path, folder: Path, *, is_folder: bool) -> Path:
    for file in files:
        with (staging / file.path).open("rb") as opened:
            os.fsync(opened.fileno())  # the rename must not reach the disk before the bytes
    if not is_folder:  # other files of the repository may lie there already
        folder.mkdir(exist_ok=True)
        target = folder / local_name(files[0])
        os.replace(staging / files[0].path, target)
        shutil.rmtree(staging, ignore_errors=True)
        return target
    keep = {file.path for file in files}
    for path in staging.iterdir():  # what the hub's client leaves beside them
        if path.name not in keep:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for gguf in folder.glob("*.gguf"):
        os.replace(gguf, staging / gguf.name)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)
    return folder


def _require_readable(staging: Path, files: Sequence[HubFile], *, is_folder: bool) -> None:
    """Refuse what no reader takes, while it is not in place yet."""
    try:
        if is_folder:
            open_folder(staging)
        else:
            open_gguf(staging / files[0].path)
    except ModelError:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _require_space(folder: Path, num_bytes: int) -> None:
    there = sum(path.stat().st_size for path in folder.rglob("*.part"))
    free = shutil.disk_usage(folder).free
    if free < num_bytes - there + SPARE_BYTES:
        raise ModelError(
            f"{(num_bytes - there) / 1e9:.2f} GB are to be fetched, {folder.parent} has "
            f"{free / 1e9:.2f} GB free",
            remedy="free some space, or set CELLPIPE_CACHE_DIR to another disk",
        )


def _verify(name: HubName, file: HubFile, path: Path) -> None:
    """Raises `ModelError`, and removes the file, unless it is what the hub lists."""
    size = path.stat().st_size if path.is_file() else 0
    if size != file.num_bytes:
        wrong = f"it has {size} bytes, the hub says {file.num_bytes}"
    elif file.sha256 is not None:
        actual = _digest(path, hashlib.sha256())
        wrong = "" if actual == file.sha256 else f"it has SHA-256 {actual[:12]}…"
    elif file.blob_sha1 is not None:
        # Git's name of a content, not a guard against forgery: the hub's listing has no other.
        head = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
        actual = _digest(path, head)
        wrong = "" if actual == file.blob_sha1 else f"it has git's SHA-1 {actual[:12]}…"
    else:
        wrong = "the hub lists no digest of it"
    if wrong:
        path.unlink(missing_ok=True)
        raise ModelError(
            f"{file.path} of {name} is not what the hub lists: {wrong}",
            remedy="pull it again: what was right is kept",
        )


def _digest(path: Path, digest: hashlib._Hash) -> str:
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _whole(name: HubName, commit: str, cache_dir: Path) -> Path | None:
    folder = _folder(name, commit, cache_dir)
    if name.file:
        path = folder / Path(name.file).name
        return path if path.is_file() else None
    return folder if (folder / "config.json").is_file() else None


def _folder(name: HubName, commit: str, cache_dir: Path) -> Path:
    return cache_dir / HUB_FOLDER / name.org / commit / name.name


def _ref(name: HubName, cache_dir: Path) -> Path:
    revision = name.revision.replace("/", "%2F")
    return cache_dir / HUB_FOLDER / name.org / "refs" / f"{name.name}@{revision}"
