"""The same models of transformers as GGUF files: names, permutations and keys are those of the
`gguf` package and of llama.cpp's converter; the logits are transformers' own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from shared.formats.hf_config import read_hf_config
from shared.formats.model import read_model
from tests.gguf_files import byte_alphabet
from tests.gguf_files import write_items as write_gguf_items
from tests.hf_folders import VOCAB
from tests.model.test_architectures import float_model
from tests.model.tiny_oracles import GGUF_VARIANTS, Oracle, make_oracle, prompt

pytestmark = pytest.mark.oracle

# A variant, and GGUF's name of its architecture.
WRITTEN = {
    "llama": "llama",
    "llama, rope linear": "llama",
    "llama, rope llama3": "llama",
    "llama, rope yarn": "llama",
    "smollm3": "smollm3",
    "mistral, no window": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2 by head": "gemma2",
    "gemma3 by head": "gemma3",
    "phi3": "phi3",
    "phi3, longrope": "phi3",
    "phi3, partial rotation": "phi3",
}
PERMUTED = ("llama", "smollm3")
# Options that the format does not carry, or carries in other words.
UNTOLD = {"architecture", "rope_pairing", "rope_scaling", "tie_word_embeddings"}


@pytest.mark.parametrize("variant", WRITTEN)
def test_a_gguf_file_gives_the_logits_of_transformers(variant: str, tmp_path: Path) -> None:
    oracle = make_oracle(variant)
    path = write_as_gguf(oracle, WRITTEN[variant], tmp_path / "m.gguf")
    description = read_model(path)
    tokens = prompt(75)

    model = float_model(description)
    got = model.logits(tokens, model.new_cache())

    assert np.abs(got - oracle.logits(tokens)).max() < 1e-4
    ours = description.config.to_dict()
    theirs = read_hf_config(oracle.config, "config.json").to_dict()
    for key in (ours.keys() | theirs.keys()) - UNTOLD:
        assert ours.get(key) == pytest.approx(theirs.get(key)), key


def test_every_architecture_of_the_format_is_written() -> None:
    from shared.formats.architectures import BY_GGUF_NAME

    assert set(WRITTEN.values()) == set(BY_GGUF_NAME)
    assert set(GGUF_VARIANTS) < set(WRITTEN)


def write_as_gguf(oracle: Oracle, name: str, path: Path) -> Path:
    config = oracle.config
    arch = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == name)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    weights = dict(oracle.weights())
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    tensors: dict[str, np.ndarray] = {}
    for hf_name, values in weights.items():
        theirs = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert theirs is not None, hf_name
        tensors[theirs] = _converted(name, hf_name, values, config)
    metadata, rope = _metadata(config, name)
    write_gguf_items(path, name, metadata, {k: (v, "F32") for k, v in (tensors | rope).items()})
    return path


def _converted(
    name: str, hf_name: str, values: np.ndarray, config: Mapping[str, Any]
) -> np.ndarray:
    if name in PERMUTED and (".q_proj." in hf_name or ".k_proj." in hf_name):
        key = "num_attention_heads" if ".q_proj." in hf_name else "num_key_value_heads"
        heads = config[key]
        pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)
    return values + 1 if name.startswith("gemma") and "norm" in hf_name else values


def _metadata(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    rope = config["rope_parameters"]
    local = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    head_dim = config["head_dim"]
    tokens = ["<pad>", "<s>", "</s>", *byte_alphabet(), "ab"]
    unused = [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    metadata: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if name in ("gemma2", "gemma3", "phi3") and config["sliding_window"]:
        metadata["attention.sliding_window"] = config["sliding_window"]
    if name == "gemma2":
        metadata["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        metadata["final_logit_softcapping"] = config["final_logit_softcapping"]
    if local is not None:
        metadata["rope.freq_base_swa"] = float(local["rope_theta"])
    scaling, factors = _scaling(config, rope)
    metadata = {f"{name}.{key}": value for key, value in (metadata | scaling).items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens + unused,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3) + [5] * len(unused),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata, factors


def _scaling(
    config: Mapping[str, Any], rope: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    match rope["rope_type"]:
        case "linear":
            return {"rope.scaling.type": "linear", "rope.scaling.factor": rope["factor"]}, {}
        case "yarn":
            original = rope["original_max_position_embeddings"]
            return {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": rope["factor"],
                "rope.scaling.original_context_length": original,
            }, {}
        case "llama3":
            return {}, {"rope_freqs.weight": _llama3_factors(config, rope)}
        case "longrope":
            original = config["original_max_position_embeddings"]
            return {
                "rope.scaling.original_context_length": original,
                "rope.scaling.attn_factor": 1.0,  # nothing is stretched in this variant
            }, {
                "rope_factors_short.weight": np.float32(rope["short_factor"]),
                "rope_factors_long.weight": np.float32(rope["long_factor"]),
            }
    return {}, {}


def _llama3_factors(config: Mapping[str, Any], rope: Mapping[str, Any]) -> np.ndarray:
    factors = []
    for i in range(0, config["head_dim"], 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / config["head_dim"])
        turns = rope["original_max_position_embeddings"] / wavelength
        if turns > rope["high_freq_factor"]:
            factors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            factors.append(rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.float32(factors)
