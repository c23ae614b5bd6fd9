"""Builds a small random packed model: a manifest and its shards, as the loader would write them.

For tests that need a model but no file. Equal arguments give equal bytes: the weights come from the
raw words of Philox, which NumPy promises to keep, unlike its distributions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shared.kernel.chunks import CHUNK_ALIGN, choose_chunk_rows, num_chunks
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
from shared.quant.nearest import quantize_int4_symmetric, quantize_int8
from shared.quant.pack import pack_blocks

Bytes = npt.NDArray[np.uint8]


@dataclass
class TinyModel:
    """A packed model in memory. `read_shard` is what `LayerGroup.load` asks for."""

    config: ModelConfig
    manifest: Manifest
    shards: dict[str, bytes]
    num_reads: dict[str, int] = field(default_factory=dict)

    def read_shard(self, name: str) -> bytes:
        self.num_reads[name] = self.num_reads.get(name, 0) + 1
        return self.shards[name]


def tiny_config(**changes: object) -> ModelConfig:
    """4 layers of 64; any field can be changed."""
    values: dict[str, object] = {
        "architecture": "llama",
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_pairing": "interleaved",
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_ids": (2,),
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def tiny_model(
    seed: int = 0,
    *,
    local_store_bytes: int = 16 * 1024,
    layer_kind: TensorKind = TensorKind.INT4,
    **changes: object,
) -> TinyModel:
    """Random weights from `seed`, int4 layers and an int8 embedding, small chunks.

    `changes` go to `tiny_config`. The tokenizer shard is missing: the kernel knows no text.
    """
    config = tiny_config(**changes)
    rng = _Uniform(seed)
    shards = {"embedding": _Shard(ShardKind.EMBEDDING, local_store_bytes)}
    d, inner = config.hidden_size, config.intermediate_size
    vocab = (config.vocab_size, d)
    shards["embedding"].matrix("embed_tokens", rng, vocab, TensorKind.INT8)
    for index in range(config.num_hidden_layers):
        layer = shards[f"layer.{index}"] = _Shard(ShardKind.LAYER, local_store_bytes, index)
        layer.norm("input_layernorm", rng, d)
        layer.matrix("q_proj", rng, (config.q_dim, d), layer_kind)
        layer.matrix("k_proj", rng, (config.kv_dim, d), layer_kind)
        layer.matrix("v_proj", rng, (config.kv_dim, d), layer_kind)
        layer.matrix("o_proj", rng, (d, config.q_dim), layer_kind)
        layer.norm("post_attention_layernorm", rng, d)
        layer.matrix("gate_proj", rng, (inner, d), layer_kind)
        layer.matrix("up_proj", rng, (inner, d), layer_kind)
        layer.matrix("down_proj", rng, (d, inner), layer_kind)
        if config.qkv_bias:
            for name, size in (("q", config.q_dim), ("k", config.kv_dim), ("v", config.kv_dim)):
                layer.floats(f"{name}_bias", rng.draw((1, size)))
        for name in ("q_norm", "k_norm") if config.qk_norm else ():
            layer.norm(name, rng, config.head_dim)
        for name in ("attention_out_norm", "mlp_out_norm") if config.post_norms else ():
            layer.norm(name, rng, d)
    head = shards["head"] = _Shard(ShardKind.HEAD, local_store_bytes)
    head.norm("norm", rng, d)
    if not config.tie_word_embeddings:
        head.matrix("lm_head", rng, vocab, layer_kind)
    rope = shards["rope"] = _Shard(ShardKind.ROPE, local_store_bytes)
    for name, table in config.rope_tables().items():
        rope.floats(name, table)
    return _finish(config, shards)


class _Uniform:
    """Numbers in [-1, 1) of 24 bits."""

    def __init__(self, seed: int) -> None:
        self._words = np.random.Philox(key=seed)

    def draw(self, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
        words = self._words.random_raw(shape[0] * shape[1])
        units = (words >> np.uint64(40)).astype(np.float32)  # exact
        return (units * np.float32(2.0**-23) - np.float32(1)).reshape(shape)


class _Shard:
    """A shard that is being written: tensors at offsets aligned to 128."""

    def __init__(self, kind: ShardKind, local_store_bytes: int, index: int = 0) -> None:
        self.kind = kind
        self.index = index
        self.data = bytearray()
        self.tensors: list[TensorEntry] = []
        self._local_store_bytes = local_store_bytes

    def matrix(self, name: str, rng: _Uniform, shape: tuple[int, int], kind: TensorKind) -> None:
        rows, cols = shape
        weights = rng.draw(shape) * np.float32((3 / cols) ** 0.5)  # variance 1 / cols
        chunk_rows = choose_chunk_rows(kind, rows, cols, local_store_bytes=self._local_store_bytes)
        if kind is TensorKind.INT4:
            packed = pack_blocks(quantize_int4_symmetric(weights), chunk_rows)
        else:
            packed = pack_blocks(quantize_int8(weights), chunk_rows)
        self._add(name, kind, shape, packed.tobytes(), chunk_rows)

    def norm(self, name: str, rng: _Uniform, size: int) -> None:
        self.floats(name, 1 + rng.draw((1, size)) * np.float32(0.25))

    def floats(self, name: str, values: npt.NDArray[np.float32]) -> None:
        rows, cols = values.shape
        self._add(name, TensorKind.F32, (rows, cols), values.astype("<f4").tobytes(), 0)

    def _add(
        self, name: str, kind: TensorKind, shape: tuple[int, int], raw: bytes, chunk_rows: int
    ) -> None:
        self.data += bytes(-len(self.data) % CHUNK_ALIGN)
        chunks = num_chunks(shape[0], chunk_rows) if chunk_rows else 0
        self.tensors.append(
            TensorEntry(name, kind, *shape, len(self.data), len(raw), chunk_rows, chunks)
        )
        self.data += raw


def _finish(config: ModelConfig, shards: dict[str, _Shard]) -> TinyModel:
    entries = []
    for name, shard in shards.items():
        raw = bytes(shard.data)
        pieces = [raw[i : i + MAX_SEGMENT_BYTES] for i in range(0, len(raw), MAX_SEGMENT_BYTES)]
        segments = tuple(SegmentEntry(len(p), hashlib.sha256(p).hexdigest()) for p in pieces)
        entries.append(
            ShardEntry(name, shard.kind, shard.index, len(raw), segments, tuple(shard.tensors))
        )
    model_id = f"tiny@{manifest_digest(config.to_dict(), entries)}"
    manifest = Manifest(model_id, config.to_dict(), tuple(entries))
    return TinyModel(config, manifest, {name: bytes(s.data) for name, s in shards.items()})
