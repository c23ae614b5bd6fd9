"""What a packed model consists of: the manifest and its JSON form. Knows no store and no kernel.

A model is stored as shards; a shard is a byte string that travels in segments of at most
`MAX_SEGMENT_BYTES`, each with its SHA-256. Tensors lie in shards at 128-byte aligned offsets;
matrices lie there as the chunks that the kernel eats. All integers in shards are little-endian.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from shared.errors import ModelError

MANIFEST_SCHEMA = 1
# Raise it whenever docs/arithmetic.md gives other numbers for the same shards: part of every model
# id, so that workers that compute differently never serve one model.
ARITHMETIC_VERSION = 2
DIGEST_CHARS = 12
MAX_SEGMENT_BYTES = 1 << 20


class ShardKind(StrEnum):
    """What a shard holds."""

    EMBEDDING = "embedding"  # the token embedding; also the head when the model ties them
    LAYER = "layer"  # one transformer layer
    HEAD = "head"  # final norm, and the head matrix unless it is tied
    ROPE = "rope"  # cos and sin tables
    TOKENIZER = "tokenizer"  # tokenizer.json and chat template as one JSON document


class TensorKind(StrEnum):
    """How a tensor's numbers are stored."""

    INT4 = "int4"  # affine, groups of 32 along the input, fp16 scale and min, in chunks
    INT8 = "int8"  # symmetric, groups of 32 along the input, fp16 scale, in chunks
    F32 = "f32"  # plain little-endian binary32, row-major


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor inside a shard. A vector has rows 1. `chunk_rows` is 0 unless it is chunked."""

    name: str
    kind: TensorKind
    rows: int
    cols: int
    offset: int
    num_bytes: int
    chunk_rows: int = 0
    num_chunks: int = 0


@dataclass(frozen=True, slots=True)
class SegmentEntry:
    """One piece of a shard as it is stored: its length and SHA-256 (hex)."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard. `index` is the layer number of a layer shard, else 0. Its name is its address."""

    name: str
    kind: ShardKind
    index: int
    num_bytes: int
    segments: tuple[SegmentEntry, ...]
    tensors: tuple[TensorEntry, ...]

    @property
    def num_chunks(self) -> int:
        return sum(t.num_chunks for t in self.tensors)

    def tensor(self, name: str) -> TensorEntry:
        """The tensor of that name; raises `ModelError` if the shard has none."""
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise ModelError(f"shard {self.name} has no tensor {name!r}")


@dataclass(frozen=True, slots=True)
class Repacking:
    """How far tensors of one name moved when their file's type became one of the kernel's.

    `relative_rms` is the root of the mean square of the change over that of the values, on a
    sample of the rows. Tensors that were kept as they were have none.
    """

    tensor: str
    source_type: str
    kind: TensorKind
    relative_rms: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """A packed model: its config (Hugging Face names), its shards, and where it came from.

    `model_id` is name@digest, the digest being that of `manifest_digest`, so that equal ids mean
    equal bits.
    """

    model_id: str
    config: Mapping[str, Any]
    shards: tuple[ShardEntry, ...]
    source: str = ""
    source_sha256: str = ""
    repacked: tuple[Repacking, ...] = ()

    def shard(self, name: str) -> ShardEntry:
        """The shard of that name; raises `ModelError` if there is none."""
        for entry in self.shards:
            if entry.name == name:
                return entry
        raise ModelError(f"model {self.model_id} has no shard {name!r}")

    def checked(self) -> Self:
        """This manifest, if it is what its id says. Raises `ModelError` otherwise."""
        if str(self.model_id).rpartition("@")[2] != manifest_digest(self.config, self.shards):
            raise ModelError(
                f"the manifest of model {self.model_id!r:.80} is damaged, or of a cellpipe that "
                "computes other numbers than this one",
                remedy="load the model again with this version: cellpipe load MODEL",
            )
        return self

    def to_json(self) -> str:
        return json.dumps({"schema": MANIFEST_SCHEMA, **asdict(self)}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Parse what `to_json` wrote. Raises `ModelError` for anything else."""
        try:
            raw = json.loads(text)
            if raw.pop("schema") != MANIFEST_SCHEMA:
                raise ModelError(
                    "the manifest has another schema version than this cellpipe reads",
                    remedy="load the model again with this version: cellpipe load MODEL",
                )
            shards = tuple(_shard_from(s) for s in raw.pop("shards"))
            config = raw.pop("config")
            if not isinstance(config, dict):
                raise ModelError(f"the manifest's config is a {type(config).__name__}, not a map")
            repacked = tuple(
                Repacking(**{**line, "kind": TensorKind(line["kind"])})
                for line in raw.pop("repacked", ())
            )
            return cls(shards=shards, config=config, repacked=repacked, **raw)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"the manifest cannot be read: {error}") from error


def manifest_digest(config: Mapping[str, Any], shards: Sequence[ShardEntry]) -> str:
    """Hex digest of all that tokens depend on: arithmetic, config, and what the shards hold."""
    content = [ARITHMETIC_VERSION, dict(config), [asdict(shard) for shard in shards]]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


def _shard_from(raw: dict[str, Any]) -> ShardEntry:
    segments = tuple(SegmentEntry(**s) for s in raw.pop("segments"))
    tensors = tuple(TensorEntry(**{**t, "kind": TensorKind(t["kind"])}) for t in raw.pop("tensors"))
    return ShardEntry(segments=segments, tensors=tensors, kind=ShardKind(raw.pop("kind")), **raw)
