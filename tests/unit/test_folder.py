"""A Hugging Face folder becomes a description, or is refused in a line that names what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.loader.packed import open_packed
from shared.errors import ModelError
from shared.formats.folder import folder_name
from shared.formats.hf_config import read_hf_config
from shared.formats.model import read_model
from shared.manifest import TensorKind
from tests.hf_folders import REMOVED, hf_config, hf_weights, write_folder

GEMMA: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": 30.0,
}


def test_a_folder_is_described_without_reading_its_tensors(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "My Model")

    description = read_model(folder)

    assert description.source == "My Model"
    assert description.config.rope_pairing == "half"
    assert (description.config.bos_token_id, description.config.eos_token_ids) == (1, (2,))
    view = description.tensors["layer.1.k_proj"]
    assert (view.kind, view.rows, view.cols) == (TensorKind.INT8, 32, 64)
    assert view.source_name == "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(
        view.read_float32(3, 9), hf_weights(hf_config())[view.source_name][3:9]
    )


def test_fused_tensors_are_cut_and_norms_are_raised(tmp_path: Path) -> None:
    phi = {"architectures": ["Phi3ForCausalLM"]}
    weights = hf_weights(hf_config(**phi))
    tensors = read_model(write_folder(tmp_path / "phi", **phi)).tensors

    qkv = weights["model.layers.0.self_attn.qkv_proj.weight"]
    for name, first, end in (("q", 0, 64), ("k", 64, 96), ("v", 96, 128)):
        view = tensors[f"layer.0.{name}_proj"]
        np.testing.assert_array_equal(view.read_float32(0, view.rows), qkv[first:end])
    gate_up = weights["model.layers.1.mlp.gate_up_proj.weight"]
    np.testing.assert_array_equal(tensors["layer.1.up_proj"].read_float32(1, 5), gate_up[97:101])

    norm = "model.layers.0.pre_feedforward_layernorm.weight"
    gemma = read_model(write_folder(tmp_path / "gemma", **GEMMA)).tensors
    view = gemma["layer.0.post_attention_layernorm"]
    assert view.source_name == norm
    np.testing.assert_array_equal(
        view.read_float32(0, 1)[0], hf_weights(hf_config(**GEMMA))[norm] + 1
    )


def test_rows_of_heads_that_rotate_in_part_are_reordered(tmp_path: Path) -> None:
    part = {"partial_rotary_factor": 0.5}  # 4 pairs (i, i + 4) of 16 dimensions
    description = read_model(write_folder(tmp_path / "m", **part))
    source = hf_weights(hf_config(**part))["model.layers.0.self_attn.k_proj.weight"]
    head = [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 6, 7, 12, 13, 14, 15]

    view = description.tensors["layer.0.k_proj"]

    assert description.config.rope_dim == 8
    np.testing.assert_array_equal(view.read_float32(0, 16), source[head])
    np.testing.assert_array_equal(view.read_float32(18, 21), source[[18, 19, 24]])
    np.testing.assert_allclose(
        view.read_rows(18, 21).dequantized(), source[[18, 19, 24]], atol=5e-3
    )


@pytest.mark.parametrize(
    ("spelling", "theta", "factor"),
    [
        ({"rope_theta": 5e5}, 5e5, None),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, 10_000, 2.0),
        (
            {
                "rope_theta": REMOVED,
                "rope_parameters": {"rope_type": "linear", "rope_theta": 77.0, "factor": 4.0},
            },
            77.0,
            4.0,
        ),
    ],
)
def test_old_and_new_spellings_of_rope_are_read(
    spelling: dict[str, Any], theta: float, factor: float | None
) -> None:
    config = read_hf_config(hf_config(**spelling), "config.json")

    assert config.rope_theta == theta
    assert (config.rope_scaling.factor if config.rope_scaling else None) == factor


def test_gemma_3_of_before_and_since_its_rope_parameters_are_one_model() -> None:
    gemma3 = {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
    old = {
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    }
    sliding, full = "sliding_attention", "full_attention"
    new = {
        "rope_theta": REMOVED,
        "rope_parameters": {
            full: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            sliding: {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": [sliding, sliding, full, sliding, sliding, full, sliding],
    }

    configs = [read_hf_config(hf_config(**gemma3, **keys), "config.json") for keys in (old, new)]

    assert configs[0] == configs[1]
    assert configs[0].sliding_layers == (0, 1, 3, 4, 6)
    assert configs[0].local_rope_theta == 10_000.0


def test_a_mistral_that_says_nothing_of_its_window_has_the_usual_one() -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}

    assert read_hf_config(hf_config(**mistral), "c").sliding_window == 4096
    none = read_hf_config(hf_config(**mistral, sliding_window=None), "c")
    assert (none.sliding_window, none.sliding_layers) == (None, ())


def test_a_tied_head_and_old_rope_tables_may_lie_in_a_folder(tmp_path: Path) -> None:
    extra = {
        "lm_head.weight": np.zeros((288, 64), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
    }

    description = read_model(write_folder(tmp_path / "m", extra))

    assert "lm_head" not in description.tensors


SHAPE = np.zeros((64, 64), np.float32)
Q = "model.layers.0.self_attn.q_proj"
WRONG_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM'; supported: Ll"),
    "no architecture": ({"architectures": REMOVED}, "architectures is missing"),
    "experts": ({"num_local_experts": 8}, "num_local_experts: mixtures of experts"),
    "latent attention": ({"kv_lora_rank": 512}, r"kv_lora_rank: latent attention \(MLA\)"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "bias": ({"attention_bias": True}, "attention_bias: biases of the attention output"),
    "activation": ({"hidden_act": "relu"}, "hidden_act 'relu' is not one of silu"),
    "missing key": ({"intermediate_size": REMOVED}, "key intermediate_size is missing"),
    "wrong type": ({"hidden_size": "64"}, "key hidden_size must be int, got '64'"),
    "layers": (
        {"num_hidden_layers": 2**31},
        "num_hidden_layers must be in 1..4096, got 2147483648",
    ),
    "vocabulary": ({"vocab_size": 10**12}, "vocab_size must be in 1..2147483647, got 10000"),
    "layer types without a window": (
        {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["linear_attention"] * 2},
        "layer_types: 'linear_attention' is not supported",
    ),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, got 0"),
    "width": ({"hidden_size": 72}, "hidden_size must be a multiple of 32, got 72"),
    "dynamic rope": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rope scaling 'dynamic' is not supported",
    ),
    "no factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
    "a factor of zero": (
        {"rope_scaling": {"type": "linear", "factor": 0}},
        "factor must lie in 1e-06.*got 0.0",
    ),
    "a list for an object": ({"rope_scaling": [1]}, r"rope_scaling must be an object, got \[1\]"),
    "layer types": (
        {**GEMMA, "layer_types": ["chunked_attention"] * 2},
        "'chunked_attention' is not supported",
    ),
    "too few layer types": ({**GEMMA, "layer_types": []}, "layer_types has 0 entries"),
    "both directions": ({**GEMMA, "use_bidirectional_attention": True}, "later positions"),
}
WRONG_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({f"{Q}.weight": REMOVED}, f"{Q}.weight is missing"),
    "left over": ({f"{Q}.bias": SHAPE[0]}, f"'{Q}.bias' has no place in a llama"),
    "third layer": (
        {"model.layers.2.input_layernorm.weight": SHAPE[0]},
        "layers.2.input_layernorm.weight' has no place",
    ),
    "shape": (
        {"model.layers.1.self_attn.k_proj.weight": SHAPE},
        r"k_proj.weight has shape \(64, 64\), not \(32, 64\)",
    ),
    "rank": ({"model.norm.weight": SHAPE[:1]}, r"norm.weight has shape \(1, 64\), not \(64,\)"),
}


@pytest.mark.parametrize("case", WRONG_CONFIGS)
def test_configs_that_cannot_be_run_are_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, named = WRONG_CONFIGS[case]
    folder = write_folder(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(hf_config(**changes)))

    with pytest.raises(ModelError, match=named) as caught:
        read_model(folder)

    assert "\n" not in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path, case: str) -> None:
    tensors, named = WRONG_TENSORS[case]

    with pytest.raises(ModelError, match=named):
        read_model(write_folder(tmp_path / "m", tensors))


def test_a_folder_without_config_and_weights_without_folder_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m")

    with pytest.raises(ModelError, match="holds weights alone"):
        read_model(folder / "model.safetensors")
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model(folder)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
values |= st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=9), values, max_size=3)


numbers = st.integers(-3, 99) | st.sampled_from([0.0, 1.0, 1e308, 1e-320, 2**70, -(2**70)])
ROPE_KEYS = (
    *("factor", "rope_theta", "low_freq_factor", "high_freq_factor", "attention_factor", "mscale"),
    *("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale_all_dim"),
    "partial_rotary_factor",
)
ropes = st.fixed_dictionaries(
    {
        "rope_type": st.sampled_from(["linear", "llama3", "yarn", "longrope"]),
        "short_factor": st.lists(numbers, min_size=7, max_size=8),
    },
    optional=dict.fromkeys(ROPE_KEYS, numbers | st.floats()),
)
TAKEN_KEYS = [*hf_config(), *GEMMA, "layer_types", "sliding_window_pattern"]


@given(
    changes=st.tuples(st.sampled_from(TAKEN_KEYS), values | numbers).map(
        lambda pair: {pair[0]: pair[1]}
    )
    | st.sampled_from(["rope_scaling", "rope_parameters"]).flatmap(
        lambda key: ropes.map(lambda rope: {key: rope})
    ),
    base=st.sampled_from([{}, GEMMA, {"architectures": ["Phi3ForCausalLM"]}]),
)
@settings(max_examples=400, deadline=None)
def test_any_value_of_a_config_is_taken_or_refused(changes: Any, base: Any) -> None:
    try:
        config = read_hf_config({**hf_config(**base), **changes}, "config.json")
    except ModelError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert config == type(config).from_dict(json.loads(json.dumps(config.to_dict())))
        assert all(np.isfinite(table).all() for table in config.rope_tables(range(4)).values())

    assert "\n" not in refusal


def test_a_folder_is_packed_once_and_again_when_a_file_changes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "Tiny")
    first = open_packed(folder, tmp_path / "cache")
    again = open_packed(folder, tmp_path / "cache")

    write_folder(folder, rope_theta=500.0)
    changed = open_packed(folder, tmp_path / "cache")

    assert first.manifest.model_id.startswith("tiny@")
    assert again.folder == first.folder
    assert changed.manifest.model_id != first.manifest.model_id


def test_a_folder_that_changes_while_it_is_packed_is_not_kept(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")

    def grow(stage: str, done: int, total: int) -> None:
        (folder / "config.json").write_text(json.dumps(hf_config()) + "\n" * 9)

    with pytest.raises(ModelError, match="model changed while it was packed"):
        open_packed(folder, tmp_path / "cache", progress=grow)

    assert not list((tmp_path / "cache" / "packed").glob("*/"))
    assert open_packed(folder, tmp_path / "cache").manifest.shards


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / name).unlink()
    os.mkfifo(folder / name)

    with pytest.raises(ModelError, match=r"is no (regular )?file|has no config"):
        read_model(folder)


def test_a_snapshot_of_the_hubs_cache_is_called_as_its_model(tmp_path: Path) -> None:
    folder = tmp_path / "models--some-org--a-model" / "snapshots" / "0123abcd"
    folder.mkdir(parents=True)

    assert folder_name(folder) == "a-model"
