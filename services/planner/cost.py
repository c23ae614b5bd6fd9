"""What parts of a model weigh and work: bytes, reads and multiply-adds. Pure arithmetic.

Bytes are those of our own chunks where the kernel has them (4 and 8 bits, scales and padding
included), and of plain halves at 16 bits. D hidden_size. Longer than other modules: formulas of a
few lines each, looked up side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from services.planner.specs import (
    DeltaAttention,
    ExpertMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
)
from services.planner.tensors import (
    Part,
    Tensor,
    embedding_tensors,
    head_tensors,
    layer_tensors,
)
from shared.errors import ConfigError
from shared.kernel.chunks import GROUP, align_up, choose_chunk_rows, matrix_bytes
from shared.topology import Wire
from shared.wire import row_bytes

BITS = (4, 8, 16)
FRAME_BYTES = 300  # of a step message beside its hidden states
MAX_SLICE_ROWS = 128  # of a prompt, as workers cut it
MAX_WORKING_BYTES = 8_000_000
FLOAT_BYTES, HALF_BYTES = 4, 2


def plain_bytes(num_parameters: float, bits: float) -> float:
    """Bytes of so many numbers of so many bits, without scales."""
    return num_parameters * bits / 8


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of weights by part, and how often each is worked with.

    `trunk_bytes` are a layer's weights that every token passes; `expert_bytes` are those of one
    routed expert, of which there are `num_experts`.
    """

    trunk_bytes: int
    expert_bytes: int
    num_experts: int
    num_experts_per_token: int

    @property
    def total_bytes(self) -> int:
        return self.trunk_bytes + self.expert_bytes * self.num_experts


def tensor_bytes(tensor: Tensor, bits: int) -> int:
    """Bytes of one copy of a tensor as it is packed. Raises `ConfigError` for other bits than
    `BITS`."""
    if bits not in BITS:
        raise ConfigError(f"--bits must be 4, 8 or 16, got {bits}")
    size = tensor.rows * tensor.cols
    if not tensor.is_matrix:
        return FLOAT_BYTES * size
    if bits == 16:
        return HALF_BYTES * size
    return _packed_bytes(f"int{bits}", tensor.rows, align_up(tensor.cols, GROUP))


@cache
def _packed_bytes(kind: str, rows: int, cols: int) -> int:
    # A row block too wide for the store is cut by columns there; that changes no byte.
    store = max(256 * 1024, 64 * cols)
    return matrix_bytes(
        kind, rows, cols, choose_chunk_rows(kind, rows, cols, local_store_bytes=store)
    )


@cache
def layer_weights(layer: LayerSpec, hidden_size: int, bits: int) -> Weights:
    """One layer's weights."""
    trunk = expert = 0
    for tensor in layer_tensors(layer, hidden_size):
        if tensor.part is Part.EXPERT:
            expert += tensor_bytes(tensor, bits)
        else:
            trunk += tensor_bytes(tensor, bits) * tensor.copies
    if isinstance(layer.mlp, ExpertMlp):
        return Weights(trunk, expert, layer.mlp.num_experts, layer.mlp.num_experts_per_token)
    return Weights(trunk, 0, 0, 0)


def part_bytes(layer: LayerSpec, hidden_size: int, bits: int) -> dict[Part, int]:
    """A layer's bytes by part, all experts together."""
    found: dict[Part, int] = {}
    for tensor in layer_tensors(layer, hidden_size):
        num_bytes = tensor_bytes(tensor, bits) * tensor.copies
        found[tensor.part] = found.get(tensor.part, 0) + num_bytes
    return found


def embedding_bits(model: ModelSpec, bits: int) -> int:
    """What embedding and head are kept in: the model's own choice, if it is the finer one."""
    return max(bits, model.embedding_bits)


def embedding_bytes(model: ModelSpec, bits: int) -> int:
    return _sum_bytes(embedding_tensors(model), embedding_bits(model, bits))


def head_bytes(model: ModelSpec, bits: int) -> int:
    """Norm and head; a tied head too, for the last group holds it beside the first."""
    return _sum_bytes(head_tensors(model), embedding_bits(model, bits))


def model_bytes(model: ModelSpec, bits: int) -> int:
    """All shards of a model, a tied head counted once."""
    total = embedding_bytes(model, bits)
    total += 0 if model.tie_word_embeddings else head_bytes(model, bits)
    return total + sum(
        layer_weights(layer, model.hidden_size, bits).total_bytes for layer in model.layers
    )


def _sum_bytes(tensors: Iterable[Tensor], bits: int) -> int:
    return sum(tensor_bytes(tensor, bits) * tensor.copies for tensor in tensors)


@cache
def kv_bytes_per_token(layer: LayerSpec) -> int:
    """Bytes of fp16 keys and values of one position in one layer; linear attention has none."""
    match layer.attention:
        case GroupedQueryAttention() as spec:
            return 2 * HALF_BYTES * spec.num_key_value_heads * spec.head_dim
        case LatentAttention() as spec:
            return HALF_BYTES * (spec.kv_lora_rank + spec.qk_rope_head_dim)
        case DeltaAttention():
            return 0


@cache
def state_bytes(layer: LayerSpec) -> int:
    """Bytes of a sequence in one layer that do not grow: KDA's matrix a head and the inputs of its
    convolutions, binary32."""
    match layer.attention:
        case DeltaAttention() as spec:
            dim = spec.num_heads * spec.head_dim
            matrices = dim * spec.head_dim
            conv = 3 * (spec.conv_kernel_size - 1) * dim
            return FLOAT_BYTES * (matrices + conv)
        case _:
            return 0


def sequence_bytes(layer: LayerSpec, context: int) -> int:
    """Bytes that one sequence of `context` positions holds in one layer."""
    return kv_bytes_per_token(layer) * context + state_bytes(layer)


@cache
def attention_multiply_adds(layer: LayerSpec, context: int) -> int:
    """Multiply-adds of attention itself of a token at position `context`, projections left out."""
    match layer.attention:
        case GroupedQueryAttention() as spec:
            return 2 * spec.num_attention_heads * spec.head_dim * context
        case LatentAttention() as spec:  # keys and values stay latent: 2.1.2 of DeepSeek-V2
            each = 2 * spec.kv_lora_rank + spec.qk_rope_head_dim
            return spec.num_attention_heads * each * context
        case DeltaAttention() as spec:  # decay, delta update and read of a matrix a head
            return 4 * spec.num_heads * spec.head_dim * spec.head_dim


@cache
def trunk_multiply_adds(layer: LayerSpec, hidden_size: int) -> int:
    """The kernel's multiply-adds of a layer's trunk for a token, activations of two terms twice."""
    return sum(
        tensor.num_parameters * tensor.terms
        for tensor in layer_tensors(layer, hidden_size)
        if tensor.is_matrix and tensor.part is not Part.EXPERT
    )


@cache
def expert_multiply_adds(layer: LayerSpec, hidden_size: int) -> int:
    """Those of one routed expert for one token."""
    return sum(
        tensor.rows * tensor.cols * tensor.terms
        for tensor in layer_tensors(layer, hidden_size)
        if tensor.part is Part.EXPERT
    )


def head_multiply_adds(model: ModelSpec) -> int:
    """Those of the head for one token."""
    return sum(t.num_parameters * t.terms for t in head_tensors(model) if t.is_matrix)


def token_multiply_adds(model: ModelSpec, context: int) -> int:
    """Those of the whole model for one token at position `context`."""
    total = head_multiply_adds(model)
    for layer in model.layers:
        total += trunk_multiply_adds(layer, model.hidden_size)
        total += attention_multiply_adds(layer, context)
        if isinstance(layer.mlp, ExpertMlp):
            each = expert_multiply_adds(layer, model.hidden_size)
            total += layer.mlp.num_experts_per_token * each
    return total


def experts_touched(num_experts: int, num_per_token: int, num_tokens: float) -> float:
    """How many different experts so many tokens choose, on average, if all are equally likely."""
    if num_experts == 0:
        return 0.0
    missed: float = (1.0 - num_per_token / num_experts) ** num_tokens
    return num_experts * (1.0 - missed)


def read_bytes(layer: LayerSpec, hidden_size: int, bits: int, num_tokens: float) -> float:
    """Bytes of weights that a step of so many tokens reads in one layer."""
    weights = layer_weights(layer, hidden_size, bits)
    touched = experts_touched(weights.num_experts, weights.num_experts_per_token, num_tokens)
    return weights.trunk_bytes + touched * weights.expert_bytes


def hop_vectors(model: ModelSpec, after_layer: int) -> int:
    """Hidden vectors of a position that travel after so many layers.

    One, but for attention residuals: the embedding, the output of each whole block and what is
    there of this one (Kimi K3: nine at the end).
    """
    if model.residual_block_layers == 0 or after_layer == 0:
        return 1
    return 2 + after_layer // model.residual_block_layers


def hop_bytes(
    model: ModelSpec, after_layer: int, wire: Wire = Wire.F32, num_tokens: int = 1
) -> int:
    """Bytes of a step message from one layer group to the next."""
    vectors = hop_vectors(model, after_layer) * num_tokens
    return FRAME_BYTES + vectors * row_bytes(wire, model.hidden_size)


def expert_width(layer: LayerSpec, hidden_size: int) -> int:
    """Values of a vector that goes to an expert and comes back."""
    assert isinstance(layer.mlp, ExpertMlp), "only layers with experts have expert messages"
    return layer.mlp.latent_size or hidden_size


def expert_message_bytes(layer: LayerSpec, hidden_size: int, wire: Wire = Wire.F32) -> int:
    """Bytes of a vector on its way to an expert's node, or back."""
    return FRAME_BYTES + row_bytes(wire, expert_width(layer, hidden_size))


@cache
def working_bytes(model: ModelSpec, num_tokens: int) -> int:
    """A worker's buffers for a step of so many tokens: hidden states in and out, the widest inner
    vector twice, and messages being read and written, binary32."""
    widest = max(
        (t.rows for layer in set(model.layers) for t in layer_tensors(layer, model.hidden_size)
         if t.is_matrix),
        default=model.hidden_size,
    )  # fmt: skip
    vectors = hop_vectors(model, model.num_hidden_layers)
    return FLOAT_BYTES * num_tokens * (4 * vectors * model.hidden_size + 2 * widest)


def slice_rows(model: ModelSpec) -> int:
    """Rows of a step that keep a worker's buffers small beside a weak node's memory."""
    return max(1, min(MAX_SLICE_ROWS, MAX_WORKING_BYTES // working_bytes(model, 1)))


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model at some bits and context, summed up for people."""

    total_bytes: int
    embedding_bytes: int
    head_bytes: int
    trunk_bytes: int
    expert_bytes: int
    kv_bytes_per_token: int
    state_bytes: int
    read_bytes_per_token: float
    multiply_adds_per_token: int


def model_cost(model: ModelSpec, bits: int, context: int) -> ModelCost:
    """Raises `ConfigError` for bits or a context that the model does not have."""
    if not 1 <= context <= model.max_position_embeddings:
        raise ConfigError(
            f"--context must be in 1..{model.max_position_embeddings} for {model.name}, "
            f"got {context}"
        )
    d = model.hidden_size
    weights = [layer_weights(layer, d, bits) for layer in model.layers]
    head = head_bytes(model, bits)
    return ModelCost(
        total_bytes=model_bytes(model, bits),
        embedding_bytes=embedding_bytes(model, bits),
        head_bytes=head,
        trunk_bytes=sum(w.trunk_bytes for w in weights),
        expert_bytes=sum(w.expert_bytes * w.num_experts for w in weights),
        kv_bytes_per_token=sum(kv_bytes_per_token(layer) for layer in model.layers),
        state_bytes=sum(state_bytes(layer) for layer in model.layers),
        read_bytes_per_token=head + sum(read_bytes(layer, d, bits, 1) for layer in model.layers),
        multiply_adds_per_token=token_multiply_adds(model, context),
    )
