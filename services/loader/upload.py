"""Puts a packed model into the store: only what is missing, and checked when it is there.

Idempotent and resumable: a segment has one address and one content, so a load that was broken off,
or two at a time, end in the same state. The manifest goes last but one and the layout last, so that
a model that can be seen is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.loader.files import StageProgress, no_progress
from services.loader.packed import PackedModel
from shared.errors import ModelError, ShardError
from shared.manifest import Manifest
from shared.store.shards import SegmentRef, ShardStore
from shared.topology import Layout


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. What was there before was not sent again."""

    model_id: str
    layout_id: str
    num_segments: int
    num_sent: int
    total_bytes: int
    sent_bytes: int


def load_model(
    packed: PackedModel,
    store: ShardStore,
    layout: Layout,
    *,
    verify: bool = True,
    progress: StageProgress = no_progress,
) -> LoadReport:
    """Store a packed model with its layout and make the layout the active one.

    With `verify` every segment is read back and its SHA-256 compared; what is wrong is sent once
    more. Raises `ShardError` when a segment is damaged on disk, or still wrong in the store after
    that; `ModelError` for a layout of another model; `StoreUnavailable` when the store fails, after
    which the same call goes on where this one stopped.
    """
    manifest = packed.manifest
    if layout.model_id != manifest.model_id:
        raise ModelError(f"layout is of {layout.model_id}, the manifest of {manifest.model_id}")
    sent = _send(packed, store, store.missing_segments(manifest, verify=False), progress)
    if verify and (wrong := store.missing_segments(manifest, verify=True)):
        sent += _send(packed, store, wrong, progress)
        if still := store.missing_segments(manifest, verify=True):
            raise ShardError(
                f"{len(still)} segments of {manifest.model_id} are wrong in the store after "
                f"they were sent twice, first {still[0].shard_name} segment {still[0].index}",
                remedy="check the store's memory (maxmemory-policy must be noeviction)",
            )
    store.put_manifest(manifest)
    store.activate(layout)
    sizes = [segment.num_bytes for shard in manifest.shards for segment in shard.segments]
    return LoadReport(
        model_id=manifest.model_id,
        layout_id=layout.layout_id,
        num_segments=len(sizes),
        num_sent=len(sent),
        total_bytes=sum(sizes),
        sent_bytes=sum(_num_bytes(manifest, ref) for ref in sent),
    )


def _send(
    packed: PackedModel, store: ShardStore, refs: Sequence[SegmentRef], progress: StageProgress
) -> list[SegmentRef]:
    manifest = packed.manifest
    total = sum(_num_bytes(manifest, ref) for ref in refs)
    done = 0
    progress("upload", 0, total)
    for ref in refs:
        body = packed.read_segment(ref.shard_name, ref.index)
        store.put_segment(manifest.model_id, ref.shard_name, ref.index, body.data)
        done += len(body)
        progress("upload", done, total)
    return list(refs)


def _num_bytes(manifest: Manifest, ref: SegmentRef) -> int:
    return manifest.shard(ref.shard_name).segments[ref.index].num_bytes
