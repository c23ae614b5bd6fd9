"""Where each tensor of ours lies in a model file: a tensor of the file, or some rows of one.

Knows names and shapes, not what is in them. Reading is the formats' own.

hd head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.formats.architectures import (
    LAYER_TENSORS_GGUF,
    LAYER_TENSORS_HF,
    OUTER_TENSORS_GGUF,
    OUTER_TENSORS_HF,
    Architecture,
)
from shared.formats.description import (
    EMBEDDING_TENSOR,
    FINAL_NORM_TENSOR,
    HEAD_TENSOR,
    TensorView,
    is_vector,
    layer_tensor,
    layer_tensors,
    tensor_shapes,
    tensor_view,
)
from shared.formats.keys import FILE_REMEDY
from shared.formats.stored_tensor import StoredTensor
from shared.kernel.matrix import Float32
from shared.model.config import ModelConfig
from shared.quant.blocks import Int4Blocks, Int8Blocks, TensorNumbers

RowOrder = npt.NDArray[np.intp]
FileFormat = Literal["hf", "gguf"]


@dataclass(frozen=True, slots=True)
class Place:
    """Rows first_row..first_row+rows-1 of the file's tensor `source`, of `source_shape`.

    A vector (rows 1) has a source_shape of one number, and its numbers are its rows. With `order`
    row i of ours is row first_row + order[i]. `offset` is added to what is read.
    """

    source: str
    source_shape: tuple[int, ...]
    rows: int
    cols: int
    first_row: int = 0
    order: RowOrder | None = None
    offset: float = 0.0


def place_tensors(
    source: str,
    architecture: Architecture,
    config: ModelConfig,
    file_format: FileFormat,
    tensors: Mapping[str, StoredTensor],
) -> dict[str, TensorView]:
    """Views of a file's tensors by our keys. `source` is the file's name.

    Raises `ModelError` for a tensor that is missing, left over, or of another shape or type than
    the config asks for.
    """
    found = places(architecture, config, file_format)
    sources = {place.source for place in found.values()}
    if left_over := sorted(set(tensors) - sources):
        raise ModelError(
            f"{source}: tensor {left_over[0]!r:.80} has no place in a {architecture.name}",
            remedy=FILE_REMEDY,
        )
    return {key: _view(source, key, place, tensors) for key, place in found.items()}


def _view(source: str, key: str, place: Place, tensors: Mapping[str, StoredTensor]) -> TensorView:
    tensor = tensors.get(place.source)
    if tensor is None:
        raise ModelError(f"{source}: tensor {place.source} is missing", remedy=FILE_REMEDY)
    if tensor.shape != place.source_shape:
        raise ModelError(
            f"{source}: tensor {place.source} has shape {tensor.shape}, not {place.source_shape}",
            remedy=FILE_REMEDY,
        )
    view = tensor_view(key, tensor, place.rows, place.cols, first_row=place.first_row)
    if place.order is not None:
        view = _ordered(view, place.order)
    return _raised(view, place.offset) if place.offset else view


def _raised(view: TensorView, offset: float) -> TensorView:
    """A vector with `offset` added to each number."""

    def read(start: int, stop: int) -> Float32:
        return view.read_float32(start, stop) + np.float32(offset)

    return replace(view, read_rows=read, read_float32=read)


def _ordered(view: TensorView, order: RowOrder) -> TensorView:
    """A view whose row i is row order[i]; of a vector, whose number i is number order[i]."""
    if is_vector(view.name):

        def read(start: int, stop: int) -> Float32:
            values = view.read_float32(start, stop)
            return values[:, order]

        return replace(view, read_rows=read, read_float32=read)

    def span(start: int, stop: int) -> tuple[int, int, RowOrder]:
        wanted = order[start:stop]
        first = int(wanted.min())
        return first, int(wanted.max()) + 1, wanted - first

    def read_rows(start: int, stop: int) -> TensorNumbers:
        first, end, rows = span(start, stop)
        match view.read_rows(first, end):
            case Int4Blocks(scale, low, nibbles):
                return Int4Blocks(scale[rows], low[rows], nibbles[rows])
            case Int8Blocks(scale, q):
                return Int8Blocks(scale[rows], q[rows])
            case values:
                return values[rows]

    def read_float32(start: int, stop: int) -> Float32:
        first, end, rows = span(start, stop)
        return view.read_float32(first, end)[rows]

    return replace(view, read_rows=read_rows, read_float32=read_float32)


def places(
    architecture: Architecture, config: ModelConfig, file_format: FileFormat
) -> dict[str, Place]:
    """Of every tensor that a model of this config has, by our key."""
    is_hf = file_format == "hf"
    outer = OUTER_TENSORS_HF if is_hf else OUTER_TENSORS_GGUF
    inner: Mapping[str, str] = {
        **(LAYER_TENSORS_HF if is_hf else LAYER_TENSORS_GGUF),
        **(architecture.hf_tensors if is_hf else architecture.gguf_tensors),
    }
    layer_prefix = "model.layers.{}." if is_hf else "blk.{}."
    shapes = tensor_shapes(config)
    offset = architecture.hf_norm_offset if is_hf else 0.0
    names = layer_tensors(config)
    order = rotated_rows(config)

    def lone(key: str, name: str, source: str) -> Place:
        rows, cols = shapes[key]
        shape: tuple[int, ...] = (cols,) if is_vector(name) else (rows, cols)
        return Place(source, shape, rows, cols, offset=offset if name.endswith("norm") else 0.0)

    found = {EMBEDDING_TENSOR: lone(EMBEDDING_TENSOR, EMBEDDING_TENSOR, outer[EMBEDDING_TENSOR])}
    for index in range(config.num_hidden_layers):
        ends: dict[str, int] = {}  # rows of a fused tensor that are taken
        layer: dict[str, Place] = {}
        for name in sorted(names, key=list(LAYER_TENSORS_GGUF).index):  # the order of fused ones
            key = layer_tensor(index, name)
            source = layer_prefix.format(index) + inner[name]
            place = lone(key, name, source)
            first = ends.get(source, 0)
            ends[source] = first + place.rows
            layer[name] = replace(place, first_row=first, order=order.get(name))
        for name in names:
            place = layer[name]
            if len(place.source_shape) == 2:
                place = replace(place, source_shape=(ends[place.source], place.cols))
            found[layer_tensor(index, name)] = place
    found[FINAL_NORM_TENSOR] = lone(FINAL_NORM_TENSOR, FINAL_NORM_TENSOR, outer[FINAL_NORM_TENSOR])
    if not config.tie_word_embeddings:
        found[HEAD_TENSOR] = lone(HEAD_TENSOR, HEAD_TENSOR, outer[HEAD_TENSOR])
    return found


def rotated_rows(config: ModelConfig) -> dict[str, RowOrder]:
    """The order of the rows of q and k, and of what goes with them, where a part of a head rotates.

    A file pairs i with i + rope_dim/2; the kernel pairs i with i + hd/2, those that turn first.
    Scores do not change when q and k are ordered alike.
    """
    if config.rope_dim in (None, config.head_dim) or config.rope_pairing != "half":
        return {}
    assert config.rope_dim is not None
    turning, half = config.rope_dim // 2, config.head_dim // 2
    still = np.arange(config.rope_dim, config.head_dim)
    head = np.concatenate(
        [
            np.arange(turning),
            still[: half - turning],
            np.arange(turning, config.rope_dim),
            still[half - turning :],
        ]
    )

    def heads(count: int) -> RowOrder:
        rows: RowOrder = np.arange(count)[:, None] * config.head_dim + head
        return rows.reshape(-1)

    q, k = heads(config.num_attention_heads), heads(config.num_key_value_heads)
    return {
        "q_proj": q, "q_bias": q, "q_norm": head, "k_proj": k, "k_bias": k, "k_norm": head
    }  # fmt: skip
