"""The planner's models: parameters counted twice, as their makers say, and what parts weigh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.planner.cost import (
    embedding_bytes,
    experts_touched,
    head_bytes,
    hop_vectors,
    kv_bytes_per_token,
    layer_weights,
    model_cost,
    part_bytes,
    plain_bytes,
    state_bytes,
    tensor_bytes,
    token_multiply_adds,
)
from services.planner.library import builtin_library
from services.planner.question import Question, demand_of
from services.planner.slices import num_heads, room_bytes
from services.planner.specs import (
    DeltaAttention,
    DenseMlp,
    ExpertMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    Published,
)
from services.planner.tensors import (
    Part,
    Tensor,
    count_active_parameters,
    count_parameters,
    layer_tensors,
)
from shared.errors import ConfigError
from shared.manifest import TensorKind
from tests.tiny_model import tiny_config, tiny_model

LIBRARY = builtin_library()
MODELS = sorted(LIBRARY.models)


def closed_formula(model: ModelSpec, *, active: bool) -> int:
    """Parameters as papers write them: per layer a few products, no list of tensors."""
    d = model.hidden_size
    total = d + model.vocab_size * d * (1 if model.tie_word_embeddings else 2)
    for layer in model.layers:
        total += 2 * d
        match layer.attention:
            case GroupedQueryAttention(heads, kv_heads, size, qk_norm):
                total += 2 * d * size * (heads + kv_heads) + 2 * size * qk_norm
            case LatentAttention(heads, q_rank, kv_rank, nope, rope, v, gate):
                total += q_rank * (d + 1 + heads * (nope + rope))
                total += d * (kv_rank + rope) + kv_rank * (1 + heads * (nope + v))
                total += (2 if gate else 1) * heads * v * d
            case DeltaAttention(heads, size, conv, decay, gate_rank):
                dim = heads * size
                total += dim * (4 * d + 3 * conv + decay + 1) + d * (decay + heads) + heads + size
                total += gate_rank * (d + dim) if gate_rank else d * dim
        match layer.mlp:
            case DenseMlp(size):
                total += 3 * d * size
            case ExpertMlp() as spec:
                width = spec.latent_size or d
                shared = spec.shared_intermediate_size or spec.moe_intermediate_size
                chosen = spec.num_experts_per_token if active else spec.num_experts
                total += spec.num_experts * (d + spec.routing_bias)
                total += 3 * d * shared * spec.num_shared_experts
                total += 3 * width * spec.moe_intermediate_size * chosen
                total += (2 * d + 1) * spec.latent_size
    return total


@pytest.mark.parametrize("name", MODELS)
def test_parameters_add_up_to_what_is_published(name: str) -> None:
    model = LIBRARY.model(name)

    total = count_parameters(model)

    assert total == closed_formula(model, active=False)
    published = model.published
    assert abs(total / published.total_parameters - 1) <= published.total_tolerance


@pytest.mark.parametrize("name", MODELS)
def test_active_parameters_are_those_that_are_published(name: str) -> None:
    model = LIBRARY.model(name)

    active = count_active_parameters(model)

    assert active == closed_formula(model, active=True)
    published = model.published
    assert abs(active / published.active_parameters - 1) <= published.active_tolerance


@pytest.mark.parametrize(
    ("name", "layers", "experts", "chosen", "shared", "millions"),
    [
        ("qwen3-30b-a3b", 48, 128, 8, 0, 4.72),
        ("deepseek-v3", 61, 256, 8, 1, 44.0),
        ("kimi-k2", 61, 384, 8, 1, 44.0),
        ("kimi-k3", 93, 896, 16, 2, 33.0),
    ],
)
def test_experts_are_those_of_the_papers(
    name: str, layers: int, experts: int, chosen: int, shared: int, millions: float
) -> None:
    model = LIBRARY.model(name)
    last = model.layers[-1]
    assert isinstance(last.mlp, ExpertMlp)

    one = sum(
        t.rows * t.cols for t in layer_tensors(last, model.hidden_size) if t.part is Part.EXPERT
    )

    assert model.num_hidden_layers == layers
    assert (last.mlp.num_experts, last.mlp.num_experts_per_token) == (experts, chosen)
    assert last.mlp.num_shared_experts == shared
    assert one / 1e6 == pytest.approx(millions, rel=0.002)


def test_kimi_k3_has_69_linear_layers_and_24_full_ones_the_last_two_among_them() -> None:
    layers = LIBRARY.model("kimi-k3").layers
    full = [i for i, layer in enumerate(layers) if isinstance(layer.attention, LatentAttention)]

    assert len(full) == 24
    assert len(layers) - len(full) == 69
    assert full[:2] == [3, 7]
    assert full[-2:] == [91, 92]


def test_kimi_k3_sends_up_to_nine_vectors_a_hop() -> None:
    model = LIBRARY.model("kimi-k3")

    assert [hop_vectors(model, n) for n in (0, 1, 12, 93)] == [1, 2, 3, 9]
    assert hop_vectors(LIBRARY.model("kimi-k2"), 61) == 1


@pytest.mark.parametrize(
    ("parameters", "bits", "gigabytes"),
    [(7e9, 16, 14.0), (7e9, 4, 3.5), (1e9, 16, 2.0), (1e9, 8, 1.0), (1e9, 4, 0.5)],
)
def test_plain_bytes_are_the_articles(parameters: float, bits: int, gigabytes: float) -> None:
    assert plain_bytes(parameters, bits) == pytest.approx(gigabytes * 1e9, rel=1e-12)


@pytest.mark.parametrize(("bits", "each"), [(4, 5.0), (8, 8.5), (16, 16.0)])
def test_a_weight_takes_its_bits_and_its_part_of_the_scales(bits: int, each: float) -> None:
    matrix = Tensor("w", Part.DENSE, 4096, 4096)

    assert tensor_bytes(matrix, bits) * 8 / (4096 * 4096) == pytest.approx(each, rel=0.001)


def test_other_bits_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--bits must be 4, 8 or 16, got 5"):
        model_cost(LIBRARY.model("kimi-k2"), 5, 4096)


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_those_that_the_packer_writes(tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    manifest = tiny_model(local_store_bytes=256 * 1024, tie_word_embeddings=tied).manifest
    attention = GroupedQueryAttention(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim
    )
    layer = LayerSpec(attention, DenseMlp(config.intermediate_size))
    kinds = {
        t.kind for s in manifest.shards if s.name.startswith("layer.") for t in s.tensors
        if t.rows > 1
    }  # fmt: skip
    assert kinds == {TensorKind.INT4}
    model = ModelSpec(
        "tiny", "tiny", config.vocab_size, config.hidden_size, tied, 256,
        (layer,) * config.num_hidden_layers, Published(1, 1, 0, 0), embedding_bits=8,
    )  # fmt: skip

    packed = {s.name: sum(t.num_bytes for t in s.tensors) for s in manifest.shards}

    assert layer_weights(layer, config.hidden_size, 4).total_bytes == packed["layer.0"]
    assert embedding_bytes(model, 4) == packed["embedding"]
    norm = 4 * config.hidden_size
    own_head = norm if tied else head_bytes(replace(model, embedding_bits=0), 4)
    assert own_head == packed["head"]
    assert kv_bytes_per_token(layer) == config.kv_row_bytes_per_layer


@pytest.mark.parametrize(
    ("name", "index", "num_bytes"),
    [
        ("llama-3.1-8b", 0, 2 * 2 * 8 * 128),
        ("qwen3-30b-a3b", 0, 2 * 2 * 4 * 128),
        ("kimi-k2", 5, 2 * (512 + 64)),
        ("kimi-k3", 3, 2 * (512 + 64)),
        ("kimi-k3", 0, 0),
    ],
)
def test_rows_of_a_token_by_kind_of_attention(name: str, index: int, num_bytes: int) -> None:
    assert kv_bytes_per_token(LIBRARY.model(name).layers[index]) == num_bytes


def test_linear_attention_keeps_a_matrix_a_head_and_nothing_that_grows() -> None:
    linear = LIBRARY.model("kimi-k3").layers[0]

    assert state_bytes(linear) == 4 * 96 * (128 * 128 + 3 * 3 * 128)
    assert state_bytes(LIBRARY.model("kimi-k3").layers[3]) == 0


def test_the_trunk_of_k2_fits_one_ps3_and_that_of_k3_does_not() -> None:
    ps3 = LIBRARY.node("ps3")
    k2, k3 = LIBRARY.model("kimi-k2"), LIBRARY.model("kimi-k3")

    def trunk(model: ModelSpec, index: int) -> int:
        return layer_weights(model.layers[index], model.hidden_size, 4).trunk_bytes

    assert trunk(k2, 1) < room_bytes(ps3, demand_of(k2, Question()))
    assert trunk(k3, 1) > room_bytes(ps3, demand_of(k3, Question()))  # KDA
    assert trunk(k3, 3) > room_bytes(ps3, demand_of(k3, Question()))  # MLA


@pytest.mark.parametrize("name", MODELS)
def test_parts_of_a_layer_are_the_layer(name: str) -> None:
    model = LIBRARY.model(name)
    for layer in set(model.layers):
        weights = layer_weights(layer, model.hidden_size, 4)
        parts = part_bytes(layer, model.hidden_size, 4)

        assert sum(parts.values()) == weights.total_bytes
        assert parts.get(Part.EXPERT, 0) == weights.expert_bytes * weights.num_experts
        assert num_heads(layer) >= 1


def test_experts_that_are_touched_grow_from_those_of_one_token_to_all() -> None:
    assert experts_touched(384, 8, 1) == pytest.approx(8)
    assert experts_touched(384, 8, 1000) == pytest.approx(384, rel=1e-6)
    assert experts_touched(0, 0, 5) == 0.0


def test_multiply_adds_of_a_token_are_about_its_active_parameters() -> None:
    model = LIBRARY.model("llama-3.1-8b")
    embedding = model.vocab_size * model.hidden_size

    work = token_multiply_adds(model, 1)

    # Between one and two terms each, and the embedding is only looked up.
    assert 1.0 < work / (count_active_parameters(model) - embedding) < 2.0


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--context must be in 1\.\.8192 for smollm2-135m, got 9000"
    ):
        model_cost(LIBRARY.model("smollm2-135m"), 4, 9000)
