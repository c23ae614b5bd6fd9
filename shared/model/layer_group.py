"""A run of layers, from shards to hidden states and logits. Knows no store, queue or sampler.

R rows of the batch, T new tokens, D hidden_size, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError, KvMissing, ModelError, ShardError
from shared.kernel.chunks import WEIGHT_ALIGN, aligned_zeros
from shared.kernel.matrix import Float32, PackedMatrix
from shared.kernel.weights import (
    GroupShape,
    GroupWeights,
    KernelBackend,
    LayerWeights,
    Logits,
    PagedSlice,
    RopeTables,
)
from shared.manifest import Manifest
from shared.model.config import ModelConfig
from shared.model.kv_cache import SequenceCache

ReadShard = Callable[[str], bytes | bytearray | memoryview | npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """num_rows consecutive positions of one sequence; `cache` holds those before."""

    cache: SequenceCache
    start_position: int
    num_rows: int


class LayerGroup:
    """Layers first_layer..end_layer-1. Not thread-safe: one thread computes."""

    def __init__(
        self,
        config: ModelConfig,
        first_layer: int,
        end_layer: int,
        weights: GroupWeights,
        backend: KernelBackend,
    ) -> None:
        self.config = config
        self.first_layer = first_layer
        self.end_layer = end_layer
        self._num_positions = weights.shape.num_positions
        self._kernel = backend.bind(weights)

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        manifest: Manifest,
        first_layer: int,
        end_layer: int,
        read_shard: ReadShard,
        *,
        first: bool,
        last: bool,
        backend: KernelBackend,
    ) -> LayerGroup:
        """Build the group from its shards; each is read once, by its name in the manifest.

        `first` groups embed, `last` groups give logits. Weights are views of the buffers that
        `read_shard` returns, or of a copy where a buffer is not aligned to 64 bytes. Raises
        `ModelError` when the manifest does not fit the config, `ShardError` for a short shard.
        """
        if not 0 <= first_layer < end_layer <= config.num_hidden_layers:
            raise ModelError(
                f"layers {first_layer}..{end_layer} are not within the model's "
                f"{config.num_hidden_layers}"
            )
        shards = _Shards(manifest, read_shard)
        ropes = _read_ropes(shards, config)
        tied = config.tie_word_embeddings
        vocab = (config.vocab_size, config.hidden_size)
        weights = GroupWeights(
            shape=_shape_of(config),
            layers=tuple(
                _read_layer(shards, config, ropes, i) for i in range(first_layer, end_layer)
            ),
            embedding=shards.matrix("embedding", "embed_tokens", *vocab) if first else None,
            final_norm=shards.vector("head", "norm", config.hidden_size) if last else None,
            head=_read_head(shards, *vocab, tied=tied) if last else None,
        )
        return cls(config, first_layer, end_layer, weights, backend)

    def new_cache(self) -> SequenceCache:
        """An empty KV cache of one sequence for this group."""
        num_layers = self.end_layer - self.first_layer
        return SequenceCache(num_layers, self.config.num_key_value_heads, self.config.head_dim)

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        """(T,) int32 -> (T, D). Raises `KernelError` for an id outside the vocabulary."""
        if token_ids.ndim != 1 or token_ids.dtype != np.int32:
            raise KernelError(f"token ids must be int32 (T,), got {_form(token_ids)}")
        return self._kernel.embed(token_ids)

    def forward(self, hidden: Float32, sequences: Sequence[SequenceSlice]) -> Float32:
        """Run the layers over hidden (R, D), the rows of the sequences one after the other.

        Returns (R, D) and leaves `hidden` as it was. Writes keys and values into the caches, whose
        rows from start_position on are replaced. Raises `KvMissing` when a cache ends before
        start_position, `KernelError` when sizes disagree or a value is not finite; the caches then
        end at start_position.
        """
        self._check_batch(hidden, sequences)
        out = np.array(hidden, np.float32, order="C")
        slices = []
        for part in sequences:
            end = part.start_position + part.num_rows
            part.cache.truncate(part.start_position)
            part.cache.ensure_capacity(end)
            slices.append(
                PagedSlice(
                    part.cache.pages,
                    part.cache.page_addresses,
                    part.start_position,
                    part.num_rows,
                )
            )
        self._kernel.forward(out, slices)
        for part in sequences:
            part.cache.advance(part.start_position + part.num_rows)
        return out

    def logits(self, hidden_rows: Float32) -> Float32:
        """(n, D) of the last layer -> (n, V): final norm and head. Raises `KernelError`."""
        return self.head(hidden_rows).values

    def head(self, hidden_rows: Float32) -> Logits:
        """`logits`, and which are the largest."""
        if hidden_rows.ndim != 2 or hidden_rows.shape[1] != self.config.hidden_size:
            raise KernelError(
                f"hidden rows must be (n, {self.config.hidden_size}), got {_form(hidden_rows)}"
            )
        return self._kernel.head(hidden_rows)

    def _check_batch(self, hidden: Float32, sequences: Sequence[SequenceSlice]) -> None:
        num_rows = sum(part.num_rows for part in sequences)
        if not sequences or hidden.shape != (num_rows, self.config.hidden_size):
            raise KernelError(
                f"hidden has shape {hidden.shape}, the batch asks for "
                f"{(num_rows, self.config.hidden_size)}"
            )
        if len({id(part.cache) for part in sequences}) != len(sequences):
            raise KernelError("a sequence may appear once in a batch")
        for part in sequences:
            start, end = part.start_position, part.start_position + part.num_rows
            if part.num_rows <= 0 or not 0 <= start <= end <= self._num_positions:
                raise KernelError(
                    f"positions {start}..{end} are not within the model's {self._num_positions}"
                )
            if start > part.cache.num_positions:
                raise KvMissing(
                    f"KV rows {part.cache.num_positions}..{start} are missing in the local cache"
                )


def _form(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} {array.shape}"


class _Shards:
    """Tensors as views of shards, each shard read once and checked against the manifest."""

    def __init__(self, manifest: Manifest, read_shard: ReadShard) -> None:
        self._manifest = manifest
        self._read_shard = read_shard
        self._buffers: dict[str, npt.NDArray[np.uint8]] = {}

    def matrix(self, shard: str, tensor: str, rows: int, cols: int) -> PackedMatrix:
        entry = self._manifest.shard(shard).tensor(tensor)
        if (entry.rows, entry.cols) != (rows, cols):
            raise ModelError(
                f"tensor {shard}/{tensor} is {entry.rows} x {entry.cols}, "
                f"the config asks for {rows} x {cols}"
            )
        buffer = self._buffer(shard)
        end = entry.offset + entry.num_bytes
        if entry.offset < 0 or entry.offset % WEIGHT_ALIGN or not 0 <= end <= len(buffer):
            raise ModelError(f"tensor {shard}/{tensor} lies outside its shard, or not aligned")
        view = buffer[entry.offset : end]
        try:
            return PackedMatrix(entry.kind, rows, cols, entry.chunk_rows, view)
        except KernelError as error:
            raise ModelError(f"tensor {shard}/{tensor}: {error}") from error

    def chunked(self, shard: str, tensor: str, rows: int, cols: int) -> PackedMatrix:
        matrix = self.matrix(shard, tensor, rows, cols)
        if matrix.kind == "f32":
            raise ModelError(f"tensor {shard}/{tensor} is f32; it must be int4 or int8")
        return matrix

    def floats(self, shard: str, tensor: str, rows: int, cols: int) -> Float32:
        matrix = self.matrix(shard, tensor, rows, cols)
        if matrix.kind != "f32":
            raise ModelError(f"tensor {shard}/{tensor} is {matrix.kind}; it must be f32")
        return matrix.f32

    def vector(self, shard: str, tensor: str, cols: int) -> Float32:
        return self.floats(shard, tensor, 1, cols).reshape(cols)

    def _buffer(self, shard: str) -> npt.NDArray[np.uint8]:
        if shard not in self._buffers:
            buffer = np.frombuffer(self._read_shard(shard), np.uint8)
            wanted = self._manifest.shard(shard).num_bytes
            if buffer.nbytes != wanted:
                raise ShardError(f"shard {shard} has {buffer.nbytes} bytes, not {wanted}")
            self._buffers[shard] = _aligned(buffer)
        return self._buffers[shard]


def _aligned(buffer: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    if buffer.ctypes.data % WEIGHT_ALIGN == 0:
        return buffer
    copy = aligned_zeros(buffer.nbytes)
    copy[:] = buffer
    return copy


def _shape_of(config: ModelConfig) -> GroupShape:
    return GroupShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        half_pairing=config.rope_pairing == "half",
        norm_eps=config.rms_norm_eps,
        num_positions=config.max_position_embeddings,
        score_scale=float(np.float32(config.score_scale)),
        score_softcap=config.attention_softcap or 0.0,
        logit_softcap=config.logit_softcap or 0.0,
        embedding_scale=config.embedding_scale,
        gelu_tanh=config.activation == "gelu_tanh",
    )


def _read_ropes(shards: _Shards, config: ModelConfig) -> dict[str | None, RopeTables | None]:
    """The tables of a model by the name that `ModelConfig.rope_of` has for them."""
    sizes = (config.max_position_embeddings, config.head_dim // 2)
    return {None: None} | {
        prefix: RopeTables(
            shards.floats("rope", f"{prefix}cos", *sizes),
            shards.floats("rope", f"{prefix}sin", *sizes),
        )
        for prefix in ("", *(("local_",) if config.has_local_rope else ()))
    }


def _read_layer(
    shards: _Shards,
    config: ModelConfig,
    ropes: dict[str | None, RopeTables | None],
    index: int,
) -> LayerWeights:
    name = f"layer.{index}"
    d, inner = config.hidden_size, config.intermediate_size

    def option(tensor: str, cols: int, *, has: bool) -> Float32 | None:
        return shards.vector(name, tensor, cols) if has else None

    return LayerWeights(
        input_norm=shards.vector(name, "input_layernorm", d),
        q=shards.chunked(name, "q_proj", config.q_dim, d),
        k=shards.chunked(name, "k_proj", config.kv_dim, d),
        v=shards.chunked(name, "v_proj", config.kv_dim, d),
        o=shards.chunked(name, "o_proj", d, config.q_dim),
        post_norm=shards.vector(name, "post_attention_layernorm", d),
        gate=shards.chunked(name, "gate_proj", inner, d),
        up=shards.chunked(name, "up_proj", inner, d),
        down=shards.chunked(name, "down_proj", d, inner),
        rope=ropes[config.rope_of(index)],
        window=config.window_of(index) or 0,
        q_bias=option("q_bias", config.q_dim, has=config.qkv_bias),
        k_bias=option("k_bias", config.kv_dim, has=config.qkv_bias),
        v_bias=option("v_bias", config.kv_dim, has=config.qkv_bias),
        q_norm=option("q_norm", config.head_dim, has=config.qk_norm),
        k_norm=option("k_norm", config.head_dim, has=config.qk_norm),
        attention_out_norm=option("attention_out_norm", d, has=config.post_norms),
        mlp_out_norm=option("mlp_out_norm", d, has=config.post_norms),
    )


def _read_head(shards: _Shards, rows: int, cols: int, *, tied: bool) -> PackedMatrix:
    if tied:
        return shards.chunked("embedding", "embed_tokens", rows, cols)
    return shards.chunked("head", "lm_head", rows, cols)
