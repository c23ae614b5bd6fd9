"""Tiny random models of transformers, one a variant of an architecture, and what they answer.

torch and transformers are not among the requirements; whoever asks without them is skipped. What
they say of the same weights is in tests/golden: python -m tests.model.tiny_oracles writes it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.hf_folders import VOCAB, byte_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "architectures.json"
GOLDEN_POSITIONS = [0, 30, 74]
GOLDEN_LOGITS = 16
NUM_LAYERS = 4
BASE: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
    "torch_dtype": "float32",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.5 * i for i in range(8)],
}


def _rope(parameters: Mapping[str, Any], theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **parameters}}


# Name of a variant: the class of its config, and what differs from BASE. Windows of 24 and 40 lie
# across pages of 16 positions, and prompts are longer.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama, rope linear": ("LlamaConfig", _rope({"rope_type": "linear", "factor": 3.0})),
    "llama, rope llama3": ("LlamaConfig", _rope(LLAMA3, 500_000.0)),
    "llama, rope yarn": ("LlamaConfig", _rope(YARN)),
    "llama, rope yarn mscale": (
        "LlamaConfig",
        _rope({**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16.0, "truncate": False}),
    ),
    "smollm3": ("SmolLM3Config", {}),
    "smollm3, given layers": (
        "SmolLM3Config",
        {"no_rope_layers": [0, 1, 1, 0], "use_sliding_window": True, "sliding_window": 24},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "mistral, no window": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 24, "query_pre_attn_scalar": 24, "num_hidden_layers": 7},
    ),
    "gemma3, rope linear": (
        "Gemma3TextConfig",
        {
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "final_logit_softcapping": 20.0,
            "attn_logit_softcapping": 10.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 24, "num_key_value_heads": 4}),
    "phi3, longrope": (
        "Phi3Config",
        {**_rope(LONGROPE), "original_max_position_embeddings": 256},
    ),
    "phi3, longrope, long": (
        "Phi3Config",
        {**_rope(LONGROPE), "original_max_position_embeddings": 64},
    ),
    "phi3, partial rotation": (
        "Phi3Config",
        {**_rope({"rope_type": "default", "partial_rotary_factor": 0.75}), "sliding_window": None},
    ),
}
# The format has no word for how these scale attention: it is known by the size.
GGUF_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2 by head": ("Gemma2Config", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3 by head": (
        "Gemma3TextConfig",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}
# transformers takes their long factors for long prompts alone; we, as llama.cpp, for all.
LONG_VARIANTS = {"phi3, longrope, long"}


@dataclass(frozen=True)
class Oracle:
    """A model of transformers in binary32, and the values of its config.json."""

    model: Any
    config: dict[str, Any]

    def weights(self) -> dict[str, np.ndarray]:
        """float32, by the names that a folder has."""
        return {name: t.detach().numpy() for name, t in self.model.state_dict().items()}

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """(T,) -> (T, V)."""
        import torch

        with torch.no_grad():
            ids = torch.tensor(token_ids[None].astype(np.int64))
            return self.model(ids, use_cache=False).logits[0].numpy()


@functools.cache
def make_oracle(variant: str) -> Oracle:
    """The random model of a variant; skips without torch and transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    class_name, changes = (VARIANTS | GGUF_VARIANTS)[variant]
    config = getattr(transformers, class_name)(**{**BASE, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().float()
    shapes = {name: tuple(values.shape) for name, values in model.named_parameters()}
    weights = random_weights(shapes, model.config.model_type)
    model.load_state_dict({k: torch.from_numpy(v) for k, v in weights.items()}, strict=False)
    return Oracle(model, _saved_config(model))


def random_weights(shapes: Mapping[str, tuple[int, ...]], model_type: str) -> dict[str, np.ndarray]:
    """float32 of these shapes, by names in alphabetical order from the raw words of Philox, which
    NumPy promises to keep."""
    words = np.random.Philox(key=7)
    weights = {}
    for name in sorted(shapes):
        raw = words.random_raw(math.prod(shapes[name]))
        units = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        units = units.reshape(shapes[name])
        if "norm" in name:
            low = 0.0 if model_type.startswith("gemma") else 1.0  # which adds the 1 itself
            weights[name] = np.float32(low) + units * np.float32(0.5)
        else:
            weights[name] = units * np.float32(0.5 if units.ndim == 1 else 0.35)
    return weights


def _saved_config(model: Any) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(model.config.to_json_string())
    raw.setdefault("architectures", [type(model).__name__])
    return raw


def save_folder(oracle: Oracle, folder: Path) -> Path:
    """As transformers writes it: config.json and safetensors; and a tokenizer of bytes."""
    oracle.model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>"})
    )
    return folder


def golden_prompt() -> np.ndarray:
    return ((np.arange(75) * 37 + 11) % (VOCAB - 3) + 3).astype(np.int32)


def write_golden() -> None:
    """Write what transformers says of every variant, for tests where it is not installed."""
    lines = {}
    for variant in VARIANTS | GGUF_VARIANTS:
        oracle = make_oracle(variant)
        logits = oracle.logits(golden_prompt())[GOLDEN_POSITIONS, :GOLDEN_LOGITS]
        rounded = [[round(float(value), 5) for value in row] for row in logits]
        lines[variant] = {"config": oracle.config, "logits": rounded}
    text = ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in lines.items())
    GOLDEN.write_text(f"{{\n{text}\n}}\n")


def prompt(num_tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, num_tokens).astype(np.int32)


if __name__ == "__main__":
    write_golden()
