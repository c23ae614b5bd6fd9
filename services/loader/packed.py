"""A packed model on disk: packs a model file once, then maps its shards. Knows no store.

A packing lies in a folder named by what went into it, and appears there by one rename when it is
whole. A shard file's length is checked when it is opened; its content when it is asked for.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.loader.files import StageProgress, files_sha256, no_progress, only_one
from services.loader.packer import PackOptions, ShardRoom, build_manifest, pack_shards
from services.loader.pull import is_path, resolve_model
from services.loader.tensors import RepackingError
from shared.errors import ModelError, ShardError
from shared.formats.folder import folder_name
from shared.formats.model import model_files, read_model
from shared.manifest import MAX_SEGMENT_BYTES, Manifest, ShardEntry
from shared.model_names import is_called, short_name

# Part of a packing's key: raise it whenever the same file would give other bytes than before.
PACKING_VERSION = 2
MANIFEST_FILE = "manifest.json"
PACKED_FOLDER = "packed"

Bytes = npt.NDArray[np.uint8]


class PackedModel:
    """The shards of one model, mapped from files."""

    def __init__(self, folder: Path) -> None:
        """Raises `ModelError` when the folder holds no whole packing."""
        self.folder = folder
        try:
            self.manifest = Manifest.from_json((folder / MANIFEST_FILE).read_bytes()).checked()
        except OSError as error:
            raise ModelError(f"{folder} holds no packed model: {error}") from error

    def read_shard(self, name: str, *, verify: bool = False) -> Bytes:
        """A shard's bytes, uint8, read-only, page aligned, not copied.

        Raises `ShardError` when the file is missing or has another length than the manifest says,
        and with `verify` when a segment fails its SHA-256.
        """
        entry = self.manifest.shard(name)
        path = self.folder / f"{name}.shard"
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise _damaged(self.folder, name, str(error)) from error
        data = np.frombuffer(mapped, dtype=np.uint8)
        if len(data) != entry.num_bytes:
            raise _damaged(self.folder, name, f"{len(data)} bytes, not {entry.num_bytes}")
        if verify:
            for index in range(len(entry.segments)):
                self._checked_segment(entry, data, index)
        return data

    def read_segment(self, name: str, index: int) -> Bytes:
        """One segment of a shard, as it travels. Raises `ShardError` if it fails its SHA-256."""
        return self._checked_segment(self.manifest.shard(name), self.read_shard(name), index)

    def verify(self) -> None:
        """Check every segment of every shard. Raises `ShardError` naming the first bad one."""
        for entry in self.manifest.shards:
            self.read_shard(entry.name, verify=True)

    def _checked_segment(self, entry: ShardEntry, data: Bytes, index: int) -> Bytes:
        segment = entry.segments[index]
        start = index * MAX_SEGMENT_BYTES
        piece = data[start : start + segment.num_bytes]
        if hashlib.sha256(piece.data).hexdigest() != segment.sha256:
            raise _damaged(self.folder, entry.name, f"segment {index} fails its SHA-256")
        return piece


def open_packed(
    model: Path,
    cache_dir: Path,
    *,
    options: PackOptions | None = None,
    progress: StageProgress = no_progress,
) -> PackedModel:
    """The packed form of a model file or folder: from the cache, or packed into it now.

    Raises `ModelError` when the file cannot be used or the cache not be written.
    """
    options = options or PackOptions()
    folder = cache_dir / PACKED_FOLDER / _key(model, options)
    if packed := _whole(folder):
        return packed
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with only_one(folder.parent / f".lock-{folder.name}"):
            if packed := _whole(folder):  # another process has packed it meanwhile
                return packed
            shutil.rmtree(folder, ignore_errors=True)
            staging = folder.parent / f".packing-{folder.name}"
            shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
            staging.mkdir()
            try:
                _pack_into(staging, model, options, progress)
                if _key(model, options) != folder.name:
                    raise ModelError(
                        f"{model.name} changed while it was packed",
                        remedy="wait until its files are whole, and try again",
                    )
                staging.rename(folder)
            finally:
                shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{model.name} cannot be packed into {folder.parent}: {error}",
            remedy="free some space, or set CELLPIPE_CACHE_DIR to a folder that can be written",
        ) from error
    return PackedModel(folder)


def open_model(
    name_or_path: str, cache_dir: Path, *, progress: StageProgress = no_progress
) -> PackedModel:
    """The packed form of a model by name or path, pulled and packed if need be.

    Raises `ModelError` when it cannot be had, or has another digest than the name asks for.
    """
    model_file = resolve_model(name_or_path, cache_dir, progress=progress)
    packed = open_packed(model_file, cache_dir, progress=progress)
    model_id = packed.manifest.model_id
    if not is_path(name_or_path) and not is_called(model_id, name_or_path.lower()):
        raise ModelError(
            f"there is no model {name_or_path!r:.200} here: the file of that name makes {model_id}",
            remedy="leave the digest away, or give the path of the file it was made from",
        )
    return packed


def _pack_into(folder: Path, model: Path, options: PackOptions, progress: StageProgress) -> None:
    description = read_model(model)
    files = model_files(model)
    source_sha256 = files_sha256(files)
    # Shards are at most about as large as what they are made of; the bar ends with the last one.
    total = sum(path.stat().st_size for path in files)
    entries: list[ShardEntry] = []
    errors: list[RepackingError] = []
    done = 0
    progress("pack", done, total)
    for shard in pack_shards(description, options, room=ShardRoom()):
        (folder / f"{shard.entry.name}.shard").write_bytes(shard.data.data)
        entries.append(shard.entry)
        errors += shard.errors
        done += shard.entry.num_bytes
        progress("pack", min(done, total), total)
    if done < total:
        progress("pack", total, total)
    manifest = build_manifest(
        description, options, entries, source_sha256=source_sha256, errors=errors
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json())


def _whole(folder: Path) -> PackedModel | None:
    """The packing in a folder, None unless its manifest and all of its shards are there."""
    try:
        packed = PackedModel(folder)
        is_whole = all(
            (folder / f"{entry.name}.shard").stat().st_size == entry.num_bytes
            for entry in packed.manifest.shards
        )
    except (ModelError, OSError):
        return None
    return packed if is_whole else None


def _key(model: Path, options: PackOptions) -> str:
    """Names a packing by its input: which files, as they are now, and the options."""
    parts: list[str | int] = [PACKING_VERSION]
    try:
        for path in model_files(model):
            status = path.stat()
            parts += [str(path.resolve()), status.st_size, status.st_mtime_ns]
    except OSError as error:
        raise ModelError(f"{model} cannot be read: {error}") from error
    parts += [options.max_context, options.local_store_bytes]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    name = folder_name(model) if model.is_dir() else model.name
    return f"{short_name(name)}-{digest[:16]}"


def _damaged(folder: Path, shard: str, why: str) -> ShardError:
    return ShardError(
        f"shard {shard} of the packed model in {folder} is damaged: {why}",
        remedy=f"delete {folder}; it is made again",
    )
