"""Which weights a model has: every tensor of its layers, embedding and head, from its sizes alone.

D hidden_size, H heads, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from services.planner.specs import (
    Attention,
    DeltaAttention,
    DenseMlp,
    ExpertMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
)


class Part(StrEnum):
    """What a tensor belongs to. All but the experts of a layer are its trunk."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    DENSE = "dense"
    ROUTER = "router"
    SHARED = "shared experts"
    LATENT = "latent"
    NORM = "norm"
    EXPERT = "experts"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Tensor:
    """`copies` tensors of (rows, cols), rows being outputs.

    A matrix is quantised, a vector kept in binary32. `terms` is how often the kernel multiplies an
    activation with a weight: 2 where inputs are quantised to 16 bits (docs/arithmetic.md).
    """

    name: str
    part: Part
    rows: int
    cols: int
    copies: int = 1
    is_matrix: bool = True
    terms: int = 1

    @property
    def num_parameters(self) -> int:
        return self.rows * self.cols * self.copies


def _vector(name: str, part: Part, size: int) -> Tensor:
    return Tensor(name, part, 1, size, is_matrix=False)


@cache
def layer_tensors(layer: LayerSpec, hidden_size: int) -> tuple[Tensor, ...]:
    """The tensors of one layer."""
    return (
        _vector("input_norm", Part.NORM, hidden_size),
        *_attention(layer.attention, hidden_size),
        _vector("post_attention_norm", Part.NORM, hidden_size),
        *_mlp(layer, hidden_size),
    )


def embedding_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    return (Tensor("embedding", Part.EMBEDDING, model.vocab_size, model.hidden_size),)


def head_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """Norm and head; a tied head is the embedding once more, as the last group holds it too."""
    return (
        _vector("final_norm", Part.NORM, model.hidden_size),
        Tensor("head", Part.HEAD, model.vocab_size, model.hidden_size, terms=2),
    )


def count_parameters(model: ModelSpec) -> int:
    """All parameters, a tied head counted once, as model cards do."""
    total = sum(t.num_parameters for t in embedding_tensors(model))
    total += sum(
        t.num_parameters
        for t in head_tensors(model)
        if not (t.part is Part.HEAD and model.tie_word_embeddings)
    )
    for layer in model.layers:
        total += sum(t.num_parameters for t in layer_tensors(layer, model.hidden_size))
    return total


def count_active_parameters(model: ModelSpec) -> int:
    """Parameters that work for one token: all but the experts that are not chosen. The embedding
    counts as a whole, as model cards have it, though a token reads one row."""
    total = sum(t.num_parameters for t in head_tensors(model))
    if not model.tie_word_embeddings:
        total += sum(t.num_parameters for t in embedding_tensors(model))
    for layer in model.layers:
        for tensor in layer_tensors(layer, model.hidden_size):
            total += tensor.num_parameters // tensor.copies * active_copies(tensor, layer)
    return total


def active_copies(tensor: Tensor, layer: LayerSpec) -> int:
    """How many of a tensor's copies work for one token."""
    if tensor.part is Part.EXPERT and isinstance(layer.mlp, ExpertMlp):
        return layer.mlp.num_experts_per_token
    return tensor.copies


def _attention(spec: Attention, d: int) -> Iterator[Tensor]:
    part = Part.ATTENTION
    match spec:
        case GroupedQueryAttention():
            q_dim = spec.num_attention_heads * spec.head_dim
            kv_dim = spec.num_key_value_heads * spec.head_dim
            yield Tensor("q", part, q_dim, d, terms=2)
            yield Tensor("k", part, kv_dim, d, terms=2)
            yield Tensor("v", part, kv_dim, d, terms=2)
            yield Tensor("o", part, d, q_dim)
            if spec.qk_norm:
                yield _vector("q_norm", Part.NORM, spec.head_dim)
                yield _vector("k_norm", Part.NORM, spec.head_dim)
        case LatentAttention():
            heads = spec.num_attention_heads
            qk_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
            yield Tensor("q_a", part, spec.q_lora_rank, d, terms=2)
            yield _vector("q_a_norm", Part.NORM, spec.q_lora_rank)
            yield Tensor("q_b", part, heads * qk_dim, spec.q_lora_rank, terms=2)
            yield Tensor("kv_a", part, spec.kv_lora_rank + spec.qk_rope_head_dim, d, terms=2)
            yield _vector("kv_a_norm", Part.NORM, spec.kv_lora_rank)
            rows = heads * (spec.qk_nope_head_dim + spec.v_head_dim)
            yield Tensor("kv_b", part, rows, spec.kv_lora_rank, terms=2)
            yield Tensor("o", part, d, heads * spec.v_head_dim)
            if spec.output_gate:
                yield Tensor("g", part, heads * spec.v_head_dim, d)
        case DeltaAttention():
            dim = spec.num_heads * spec.head_dim
            for name in ("q", "k", "v"):
                yield Tensor(name, part, dim, d, terms=2)
                yield Tensor(f"{name}_conv", part, dim, spec.conv_kernel_size, is_matrix=False)
            yield Tensor("decay_a", part, spec.decay_rank, d)
            yield Tensor("decay_b", part, dim, spec.decay_rank)
            yield _vector("decay_bias", part, dim)
            yield _vector("decay_log", part, spec.num_heads)
            yield Tensor("beta", part, spec.num_heads, d)
            if spec.gate_rank:
                yield Tensor("g_a", part, spec.gate_rank, d)
                yield Tensor("g_b", part, dim, spec.gate_rank)
            else:
                yield Tensor("g", part, dim, d)
            yield _vector("o_norm", Part.NORM, spec.head_dim)
            yield Tensor("o", part, d, dim)


def _mlp(layer: LayerSpec, d: int) -> Iterator[Tensor]:
    match layer.mlp:
        case DenseMlp(size):
            yield from _gated("", Part.DENSE, size, d, 1)
        case ExpertMlp() as spec:
            yield Tensor("router", Part.ROUTER, spec.num_experts, d, terms=2)
            if spec.routing_bias:
                yield _vector("routing_bias", Part.ROUTER, spec.num_experts)
            width = spec.latent_size or d
            if spec.latent_size:
                yield Tensor("latent_down", Part.LATENT, spec.latent_size, d)
                yield _vector("latent_norm", Part.NORM, spec.latent_size)
                yield Tensor("latent_up", Part.LATENT, d, spec.latent_size)
            if spec.num_shared_experts:
                size = spec.shared_intermediate_size or spec.moe_intermediate_size
                yield from _gated("shared_", Part.SHARED, size, d, spec.num_shared_experts)
            yield from _gated(
                "expert_", Part.EXPERT, spec.moe_intermediate_size, width, spec.num_experts
            )


def _gated(prefix: str, part: Part, size: int, width: int, copies: int) -> Iterator[Tensor]:
    yield Tensor(f"{prefix}gate", part, size, width, copies)
    yield Tensor(f"{prefix}up", part, size, width, copies)
    yield Tensor(f"{prefix}down", part, width, size, copies, terms=2)
