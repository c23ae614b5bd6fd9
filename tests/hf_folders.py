"""Writes tiny Hugging Face folders for tests, right or wrong in one chosen place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from shared.formats.hf_config import architecture_of, read_hf_config
from shared.formats.placement import places
from tests.gguf_files import byte_alphabet
from tests.safetensors_files import write_safetensors

VOCAB = 288
REMOVED = object()  # marks a key or a tensor to leave out

BASE: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf_config(**changes: Any) -> dict[str, Any]:
    """The values of a config.json: BASE with changes."""
    return {key: value for key, value in (BASE | changes).items() if value is not REMOVED}


def write_folder(
    folder: Path, tensors: Mapping[str, Any] | None = None, *, dtype: str = "BF16", **changes: Any
) -> Path:
    """Write a model with random weights and return its folder.

    `tensors` replace, add or remove; `changes` go to config.json, and must be such that it can be
    read.
    """
    raw = hf_config(**changes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(byte_tokenizer())
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    weights = {**hf_weights(raw), **(tensors or {})}
    write_safetensors(
        folder / "model.safetensors",
        {name: (values, dtype) for name, values in weights.items() if values is not REMOVED},
    )
    return folder


def hf_weights(raw: Mapping[str, Any], seed: int = 7) -> dict[str, np.ndarray]:
    """Random float32 weights, whole numbers of 1/64, which bf16 holds exactly."""
    config = read_hf_config(raw, "config.json")
    rng = np.random.default_rng(seed)
    found = places(architecture_of(raw, "config.json"), config, "hf").values()
    shapes = {place.source: place.source_shape for place in found}
    return {
        name: np.float32(rng.integers(-32, 33, shape) / 64 + (len(shape) == 1))
        for name, shape in shapes.items()
    }


def byte_tokenizer() -> str:
    """A tokenizer.json whose tokens are <pad>, <s>, </s> and the 256 bytes."""
    pieces = ["<pad>", "<s>", "</s>", *byte_alphabet()]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(pieces[:3])
    return str(tokenizer.to_str())
