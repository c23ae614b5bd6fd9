"""Turns a model description into shards in the kernel's chunk layout. Knows no file and no store.

One shard is in memory at a time, and of its source a few thousand rows. docs/arithmetic.md draws
the chunks; `shared.manifest` says what shards and segments are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import numpy as np
import numpy.typing as npt

from services.loader.tensors import RepackingError, pack_tensor, summed
from shared.errors import ConfigError
from shared.formats.description import (
    EMBEDDING_TENSOR,
    FINAL_NORM_TENSOR,
    HEAD_TENSOR,
    ModelDescription,
    TensorView,
    layer_tensor,
    layer_tensors,
)
from shared.kernel.chunks import (
    CHUNK_ALIGN,
    DEFAULT_LOCAL_STORE_BYTES,
    align_up,
    aligned_zeros,
    choose_chunk_rows,
    matrix_bytes,
    num_chunks,
)
from shared.manifest import (
    MAX_SEGMENT_BYTES,
    Manifest,
    SegmentEntry,
    ShardEntry,
    ShardKind,
    TensorEntry,
    TensorKind,
    manifest_digest,
)
from shared.model.config import ModelConfig
from shared.model_names import short_name
from shared.text.document import write_text_document
from shared.text.tokenizer import Tokenizer

DEFAULT_MAX_CONTEXT = 32_768

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class PackOptions:
    """What changes a packed model's bytes beside the model itself.

    `max_context` bounds the positions of the rope shard, `local_store_bytes` the chunks.
    """

    max_context: int = DEFAULT_MAX_CONTEXT
    local_store_bytes: int = DEFAULT_LOCAL_STORE_BYTES

    def __post_init__(self) -> None:
        if self.max_context < 1:
            raise ConfigError(f"max_context must be positive, got {self.max_context}")


@dataclass(frozen=True, slots=True)
class PackedShard:
    """A shard's bytes, uint8, aligned to 64, its line in the manifest, and what repacking cost."""

    entry: ShardEntry
    data: Bytes
    errors: tuple[RepackingError, ...] = ()


class ShardRoom:
    """Memory for one shard at a time: to be given fresh pages for each takes as long as packing."""

    def __init__(self) -> None:
        self._room = aligned_zeros(0)

    def zeros(self, num_bytes: int) -> Bytes:
        """Zeroed bytes, aligned to 64, in place of those that were given before."""
        if len(self._room) < num_bytes:
            self._room = aligned_zeros(num_bytes)
        else:
            self._room[:num_bytes] = 0
        return self._room[:num_bytes]


def packed_config(config: ModelConfig, options: PackOptions) -> ModelConfig:
    """The config as the manifest carries it: with as many positions as the rope shard has."""
    positions = min(config.max_position_embeddings, options.max_context)
    return replace(config, max_position_embeddings=positions)


def pack_shards(
    description: ModelDescription,
    options: PackOptions | None = None,
    *,
    room: ShardRoom | None = None,
) -> Iterator[PackedShard]:
    """Every shard of a model, in the order of the forward pass, one in memory at a time.

    With `room` they lie there, each until the next is asked for. Raises `ModelError` for numbers
    that are not finite or a tokenizer that is not supported, and `ConfigError` for a local store
    that is too small.
    """
    options = options or PackOptions()
    config = packed_config(description.config, options)
    tensors = description.tensors
    text = write_text_document(
        Tokenizer.from_vocabulary(description.vocabulary), description.chat_template
    )
    yield _shard("tokenizer", ShardKind.TOKENIZER, 0, np.frombuffer(text, np.uint8), ())
    yield _rope_shard(config)
    yield _tensor_shard(
        "embedding",
        ShardKind.EMBEDDING,
        0,
        {EMBEDDING_TENSOR: tensors[EMBEDDING_TENSOR]},
        options,
        room,
    )
    for index in range(config.num_hidden_layers):
        views = {name: tensors[layer_tensor(index, name)] for name in layer_tensors(config)}
        yield _tensor_shard(f"layer.{index}", ShardKind.LAYER, index, views, options, room)
    names = (FINAL_NORM_TENSOR, HEAD_TENSOR)
    views = {name: tensors[name] for name in names if name in tensors}
    yield _tensor_shard("head", ShardKind.HEAD, 0, views, options, room)


def build_manifest(
    description: ModelDescription,
    options: PackOptions,
    shards: Sequence[ShardEntry],
    *,
    source_sha256: str,
    errors: Sequence[RepackingError] = (),
) -> Manifest:
    """The manifest over packed shards. Its id is the file's name and its digest."""
    config = packed_config(description.config, options).to_dict()
    model_id = f"{short_name(description.source)}@{manifest_digest(config, shards)}"
    return Manifest(
        model_id, config, tuple(shards), description.source, source_sha256, summed(errors)
    )


def _rope_shard(config: ModelConfig) -> PackedShard:
    tables = config.rope_tables()
    entries: list[TensorEntry] = []
    end = 0
    for name, table in tables.items():
        rows, cols = table.shape
        offset = align_up(end, CHUNK_ALIGN)
        entries.append(TensorEntry(name, TensorKind.F32, rows, cols, offset, table.nbytes))
        end = offset + table.nbytes
    data = aligned_zeros(align_up(end, CHUNK_ALIGN))
    for entry in entries:
        place = data[entry.offset : entry.offset + entry.num_bytes]
        place.view("<f4")[:] = tables[entry.name].reshape(-1)
    return _shard("rope", ShardKind.ROPE, 0, data, tuple(entries))


def _tensor_shard(
    name: str,
    kind: ShardKind,
    index: int,
    views: dict[str, TensorView],
    options: PackOptions,
    room: ShardRoom | None,
) -> PackedShard:
    entries: list[TensorEntry] = []
    end = 0
    for short, view in views.items():
        entry = tensor_entry(short, view, align_up(end, CHUNK_ALIGN), options)
        entries.append(entry)
        end = entry.offset + entry.num_bytes
    num_bytes = align_up(end, CHUNK_ALIGN)
    data = room.zeros(num_bytes) if room else aligned_zeros(num_bytes)
    errors: list[RepackingError] = []
    for entry in entries:
        place = data[entry.offset : entry.offset + entry.num_bytes]
        if error := pack_tensor(views[entry.name], entry, place):
            errors.append(error)
    return _shard(name, kind, index, data, tuple(entries), tuple(errors))


def tensor_entry(name: str, view: TensorView, offset: int, options: PackOptions) -> TensorEntry:
    """The line of a tensor in its shard, from its shape alone."""
    rows, cols = view.rows, view.cols
    match view.kind:
        case TensorKind.F32:
            return TensorEntry(name, view.kind, rows, cols, offset, 4 * rows * cols)
        case TensorKind.INT4 | TensorKind.INT8:
            kind = view.kind.value
            chunk_rows = choose_chunk_rows(
                kind, rows, cols, local_store_bytes=options.local_store_bytes
            )
            return TensorEntry(
                name,
                view.kind,
                rows,
                cols,
                offset,
                matrix_bytes(kind, rows, cols, chunk_rows),
                chunk_rows,
                num_chunks(rows, chunk_rows),
            )
        case _:
            assert_never(view.kind)


def _shard(
    name: str,
    kind: ShardKind,
    index: int,
    data: Bytes,
    tensors: tuple[TensorEntry, ...],
    errors: tuple[RepackingError, ...] = (),
) -> PackedShard:
    segments = tuple(
        SegmentEntry(len(piece), hashlib.sha256(piece.data).hexdigest())
        for start in range(0, len(data), MAX_SEGMENT_BYTES)
        for piece in (data[start : start + MAX_SEGMENT_BYTES],)
    )
    return PackedShard(ShardEntry(name, kind, index, len(data), segments, tensors), data, errors)
