"""What is asked of a model, and what one of several slices of a layer holds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from services.planner.cost import kv_bytes_per_token, state_bytes, working_bytes
from services.planner.specs import (
    DeltaAttention,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    NodeSpec,
)


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked of a model: bits of its weights, positions of a sequence and of its prompt, and
    the most rows of a step."""

    model: ModelSpec
    bits: int
    context: int
    prompt: int
    max_rows: int


def room_bytes(node: NodeSpec, demand: Demand) -> int:
    """What a node has left for weights and sequences."""
    return node.memory_bytes - node.reserved_bytes - working_bytes(demand.model, demand.max_rows)


def num_heads(layer: LayerSpec) -> int:
    """Attention heads, the most slices that a layer can be cut into."""
    match layer.attention:
        case DeltaAttention() as spec:
            return spec.num_heads
        case spec:
            return spec.num_attention_heads


@cache
def slice_share(layer: LayerSpec, width: int) -> float:
    """The part of a layer's weights that the largest of `width` slices has: whole heads."""
    heads = num_heads(layer)
    return math.ceil(heads / width) / heads


@cache
def sliced_sequence_bytes(layer: LayerSpec, context: int, width: int) -> int:
    """What a sequence takes in one slice: KV heads and states are shared out, MLA's latent, which
    every head reads, is in every slice."""
    kv = kv_bytes_per_token(layer) * context
    match layer.attention:
        case GroupedQueryAttention() as spec:
            heads = spec.num_key_value_heads
            return math.ceil(kv * math.ceil(heads / width) / heads)
        case LatentAttention():
            return kv
        case DeltaAttention():
            return math.ceil(state_bytes(layer) * slice_share(layer, width))
