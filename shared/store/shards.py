"""Manifests, layouts and the bytes of shards. Knows no kernel and no tensor.

Owns the promise that a shard that is read is bit for bit what its manifest says: every segment is
checked against its SHA-256 on the way. A segment is read, checked and copied before the next, so
that reading a shard takes its own bytes and about one segment more.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError, ShardError
from shared.manifest import Manifest, SegmentEntry
from shared.model_names import is_called
from shared.store import keys
from shared.store.connection import Connection
from shared.topology import Layout

# Model and layout ids are parts of keys and of queue names.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,199}\Z")
_ALIGNMENT = 128  # what a chunk is aligned to inside its shard
_LENGTHS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """The address of one segment of a model."""

    shard_name: str
    index: int


class ShardStore:
    """Packed models. Raises `StoreUnavailable` when the store does not answer or is full."""

    def __init__(self, weights: Connection) -> None:
        self._weights = weights

    def put_manifest(self, manifest: Manifest) -> None:
        """Store a manifest; best done last, since a model with one is taken to be there."""
        _check_id("model_id", manifest.model_id)
        self._weights.run(("SET", keys.manifest(manifest.model_id), manifest.to_json()))
        self._weights.run(("SADD", keys.MODELS, manifest.model_id))

    def get_manifest(self, model_id: str) -> Manifest:
        """The manifest of a model. Raises `ModelError` when there is none or it is garbled."""
        text = self._weights.run(("GET", keys.manifest(model_id)))
        if text is None:
            raise ModelError(
                f"model {model_id!r} is not in the store at {self._weights.name}",
                remedy="load it: cellpipe load MODEL",
            )
        return Manifest.from_json(text)

    def models(self) -> list[str]:
        """The ids of all models in the store, sorted."""
        return sorted(raw.decode() for raw in self._weights.run(("SMEMBERS", keys.MODELS)))

    def put_segment(
        self, model_id: str, shard_name: str, index: int, body: bytes | memoryview
    ) -> None:
        """Store one segment of a shard."""
        self._weights.run(("SET", keys.segment(model_id, shard_name, index), body))

    def missing_segments(self, manifest: Manifest, *, verify: bool) -> list[SegmentRef]:
        """What an upload still has to send, in the manifest's order.

        Compares lengths, or with `verify` reads every segment back and compares its SHA-256.
        """
        entries = [
            (SegmentRef(shard.name, index), segment)
            for shard in manifest.shards
            for index, segment in enumerate(shard.segments)
        ]
        if verify:
            return [
                ref
                for ref, segment in entries
                if _problem(self._get(manifest.model_id, ref), segment)
            ]
        missing = []
        for first in range(0, len(entries), _LENGTHS_AT_ONCE):
            some = entries[first : first + _LENGTHS_AT_ONCE]
            lengths = self._weights.run_all(
                [("STRLEN", _key(manifest.model_id, ref)) for ref, _ in some]
            )
            missing += [
                ref
                for (ref, segment), length in zip(some, lengths, strict=True)
                if length != segment.num_bytes
            ]
        return missing

    def read_shard(
        self, manifest: Manifest, shard_name: str, out: npt.NDArray[np.uint8] | None = None
    ) -> npt.NDArray[np.uint8]:
        """The bytes of a shard, uint8 (num_bytes,), in `out` or in a new 128-byte aligned array.

        Raises `ShardError` for a segment that is missing or fails its SHA-256, `ModelError` when
        the manifest has no such shard, and `ValueError` unless `out` is a writable, contiguous
        uint8 array of the shard's size.
        """
        shard = manifest.shard(shard_name)
        if sum(segment.num_bytes for segment in shard.segments) != shard.num_bytes:
            raise ShardError(
                f"model {manifest.model_id}: the segments of shard {shard_name} do not add up to "
                f"its {shard.num_bytes} bytes"
            )
        if out is None:
            out = _aligned_empty(shard.num_bytes)
        flags = out.flags
        if out.dtype != np.uint8 or out.shape != (shard.num_bytes,) or not flags.c_contiguous:
            raise ValueError(f"out must be contiguous uint8 ({shard.num_bytes},), got {out.shape}")
        start = 0
        for index, segment in enumerate(shard.segments):
            body = self._get(manifest.model_id, SegmentRef(shard_name, index))
            if problem := _problem(body, segment):
                raise ShardError(
                    f"model {manifest.model_id}, shard {shard_name}, segment {index} {problem} "
                    f"in the store at {self._weights.name}",
                    remedy="load the model again, which sends only what is wrong: "
                    "cellpipe load MODEL",
                )
            out[start : start + segment.num_bytes] = np.frombuffer(body or b"", np.uint8)
            start += segment.num_bytes
        return out

    def put_layout(self, layout: Layout) -> None:
        """Store a layout beside the others of its model."""
        _check_id("layout_id", layout.layout_id)
        self._weights.run(
            ("HSET", keys.layouts(layout.model_id), layout.layout_id, layout.to_json())
        )

    def layouts(self, model_id: str) -> list[Layout]:
        """All layouts of a model, by id."""
        flat = self._weights.run(("HGETALL", keys.layouts(model_id)))
        return sorted(map(Layout.from_json, flat[1::2]), key=lambda layout: layout.layout_id)

    def activate(self, layout: Layout) -> None:
        """Make this the layout that workers serve, and its model the one that "" means.

        Raises `ModelError` unless the model's manifest is in the store.
        """
        self.get_manifest(layout.model_id)
        self.put_layout(layout)
        self._weights.run(("SET", keys.active_layout(layout.model_id), layout.layout_id))
        self._weights.run(("SET", keys.ACTIVE_MODEL, layout.model_id))

    def active_layout(self, model_id: str = "") -> Layout:
        """The layout to serve of a model by any of its names; "" is the one activated last.

        Raises `ModelError` when no model, or no layout of this model, is active, and for a name
        that several have.
        """
        if not model_id:
            raw_id = self._weights.run(("GET", keys.ACTIVE_MODEL))
            if raw_id is None:
                raise ModelError(
                    f"no model is loaded in the store at {self._weights.name}",
                    remedy="load one: cellpipe load MODEL --groups N",
                )
            model_id = raw_id.decode()
        else:
            model_id = self._id_of(model_id)
        layout_id = self._weights.run(("GET", keys.active_layout(model_id)))
        text = layout_id and self._weights.run(("HGET", keys.layouts(model_id), layout_id))
        if text is None:
            loaded = ", ".join(self.models())
            raise ModelError(
                f"model {model_id!r} has no active layout in the store at {self._weights.name} "
                f"(models there: {loaded or 'none'})",
                remedy=("name one of those, or " if loaded else "")
                + "load it, by its name in the catalog or its file: cellpipe load MODEL --groups N",
            )
        return Layout.from_json(text)

    def _id_of(self, asked: str) -> str:
        """The id of the model that is called so; what was asked when none is."""
        found = [model_id for model_id in self.models() if is_called(model_id, asked)]
        if not found or asked in found:
            return asked
        if len(found) > 1:  # files of one name
            active = (self._weights.run(("GET", keys.ACTIVE_MODEL)) or b"").decode()
            if active not in found:
                raise ModelError(
                    f"{len(found)} models are called {asked!r}: {', '.join(found)}",
                    remedy="give one of these ids",
                )
            return active
        return found[0]

    def _get(self, model_id: str, ref: SegmentRef) -> bytes | None:
        body: bytes | None = self._weights.run(("GET", _key(model_id, ref)))
        return body


def _key(model_id: str, ref: SegmentRef) -> str:
    return keys.segment(model_id, ref.shard_name, ref.index)


def _problem(body: bytes | None, segment: SegmentEntry) -> str:
    """What is wrong with a stored segment, or "" when nothing is."""
    if body is None:
        return "is missing"
    if len(body) != segment.num_bytes:
        return f"has {len(body)} bytes instead of {segment.num_bytes}"
    if hashlib.sha256(body).hexdigest() != segment.sha256:
        return "fails its SHA-256"
    return ""


def _aligned_empty(num_bytes: int) -> npt.NDArray[np.uint8]:
    room = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + num_bytes]


def _check_id(name: str, value: str) -> None:
    if not _ID.match(value):
        raise ModelError(f"{name} must be 1-200 letters, digits or ._@+-, got {value!r:.80}")
