"""One description per architecture: what its files call things, and which options it has.

The kernel knows none of these names: it gets sizes and options (`shared/model/config.py`). What a
description does not say is common to all: the tables below. Longer than other modules: the
descriptions stand side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.formats.keys import Keys

Options = dict[str, Any]  # fields of ModelConfig

# Our tensor -> where it lies in a layer of a Hugging Face folder, and in one of a GGUF file.
# Several of ours in one place lie there one below the other, in this order.
LAYER_TENSORS_HF = {
    "input_layernorm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o_proj": "self_attn.o_proj.weight",
    "post_attention_layernorm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
LAYER_TENSORS_GGUF = {
    "input_layernorm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o_proj": "attn_output.weight",
    "attention_out_norm": "post_attention_norm.weight",
    "post_attention_layernorm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
    "mlp_out_norm": "post_ffw_norm.weight",
}
OUTER_TENSORS_HF = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
}
OUTER_TENSORS_GGUF = {
    "embed_tokens": "token_embd.weight",
    "norm": "output_norm.weight",
    "lm_head": "output.weight",
}


def _no_options(_keys: Keys, _num_layers: int) -> Options:
    return {}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture differs from a llama.

    - `hf_class` is its entry in `architectures` of a config.json, `gguf_name` GGUF's
      `general.architecture`.
    - `options` hold for every model of it; `hf_options` and `gguf_options` read those that differ
      from model to model, from config.json and from GGUF's metadata (without the prefix).
    - `hf_defaults` are what Hugging Face's class takes for keys that a config.json leaves out.
    - `hf_tensors`, `gguf_tensors`: names that differ from the common ones.
    - `hf_norm_offset` is added to the norms of a folder, which are stored less that.
    - `gguf_pairing`: llama.cpp's converter permutes q and k of some architectures.
    """

    name: str
    hf_class: str
    gguf_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    hf_defaults: Mapping[str, Any] = field(default_factory=dict)
    hf_options: Callable[[Keys, int], Options] = _no_options
    gguf_options: Callable[[Keys, int], Options] = _no_options
    hf_tensors: Mapping[str, str] = field(default_factory=dict)
    gguf_tensors: Mapping[str, str] = field(default_factory=dict)
    hf_norm_offset: float = 0.0
    gguf_pairing: Literal["interleaved", "half"] = "half"
    refused: Mapping[str, str] = field(default_factory=dict)  # config.json's keys that must be off


def sliding(window: int | None, layers: list[int]) -> Options:
    """Those layers see `window` positions; with a window of None or no layers, none does."""
    if window is None or not layers:
        return {}
    return {"sliding_window": window, "sliding_layers": tuple(layers)}


def _hf_layer_types(keys: Keys, num_layers: int, without: list[int]) -> list[int]:
    """Layers that config.json's layer_types calls sliding; `without` where it says nothing."""
    types = keys.items("layer_types", str)
    if types is None:
        return without
    if len(types) != num_layers:
        raise keys.bad(f"layer_types has {len(types)} entries, the model {num_layers} layers")
    if unknown := sorted(set(types) - {"sliding_attention", "full_attention"}):
        raise keys.bad(f"layer_types: {unknown[0]!r:.40} is not supported")
    return [index for index, kind in enumerate(types) if kind == "sliding_attention"]


def _all_sliding(keys: Keys, num_layers: int) -> Options:
    return sliding(keys.optional("sliding_window", int), [*range(num_layers)])


def _gguf_all_sliding(keys: Keys, num_layers: int) -> Options:
    return sliding(keys.optional("attention.sliding_window", int), [*range(num_layers)])


def _qwen_sliding(keys: Keys, num_layers: int) -> Options:
    first = keys.optional("max_window_layers", int) or 0
    layers = _hf_layer_types(keys, num_layers, [*range(max(first, 0), num_layers)])
    if not keys.optional("use_sliding_window", bool):
        return {}
    return sliding(keys.optional("sliding_window", int), layers)


def _smollm3_hf(keys: Keys, num_layers: int) -> Options:
    uses = keys.items("no_rope_layers", int)  # 1: the layer rotates
    if uses is None:
        every = keys.required("no_rope_layer_interval", int)
        free = _every(keys, num_layers, every)
    elif len(uses) < num_layers:
        raise keys.bad(f"no_rope_layers has {len(uses)} entries, the model {num_layers} layers")
    else:
        free = [index for index in range(num_layers) if not uses[index]]
    options: Options = {"rope_free_layers": tuple(free)}
    if keys.optional("use_sliding_window", bool):
        layers = _hf_layer_types(keys, num_layers, free)
        options |= sliding(keys.optional("sliding_window", int), layers)
    return options


def _smollm3_gguf(keys: Keys, num_layers: int) -> Options:
    return {"rope_free_layers": tuple(_every(keys, num_layers, 4))}  # the format does not say


def _every(keys: Keys, num_layers: int, step: int) -> list[int]:
    if step < 1:
        raise keys.bad(f"a pattern of layers that repeats after {step} is not possible")
    return [index for index in range(num_layers) if (index + 1) % step == 0]


def _not_every(keys: Keys, num_layers: int, step: int) -> list[int]:
    kept = set(_every(keys, num_layers, step))
    return [index for index in range(num_layers) if index not in kept]


def _gemma_hf(keys: Keys, num_layers: int) -> Options:
    step = keys.required("sliding_window_pattern", int)
    layers = _hf_layer_types(keys, num_layers, _not_every(keys, num_layers, step))
    return {
        **sliding(keys.required("sliding_window", int), layers),
        "embedding_scale": _root(keys.required("hidden_size", int)),
        "attention_scale": _inverse_root(keys, keys.required("query_pre_attn_scalar", float)),
        "logit_softcap": keys.optional("final_logit_softcapping", float),
    }


def _gemma2_hf(keys: Keys, num_layers: int) -> Options:
    cap = keys.optional("attn_logit_softcapping", float)  # which Gemma 3 has, and does not use
    return {**_gemma_hf(keys, num_layers), "attention_softcap": cap}


def _gemma_gguf(keys: Keys, num_layers: int) -> Options:
    return {
        "embedding_scale": _root(keys.required("embedding_length", int)),
        "logit_softcap": keys.optional("final_logit_softcapping", float),
    }


def _gemma2_gguf(keys: Keys, num_layers: int) -> Options:
    # The 27B model scales by its width per head, the others by head_dim; the format does not say.
    by_width = num_layers == 46
    heads = keys.required("attention.head_count", int)
    scalar = (
        keys.required("embedding_length", int) / max(heads, 1)
        if by_width
        else keys.required("attention.key_length", int)
    )
    window = keys.optional("attention.sliding_window", int) or 4096
    return {
        **_gemma_gguf(keys, num_layers),
        "attention_softcap": keys.optional("attn_logit_softcapping", float) or 50.0,
        "logit_softcap": keys.optional("final_logit_softcapping", float) or 30.0,
        **sliding(window, _not_every(keys, num_layers, _gguf_pattern(keys, 2))),
        "attention_scale": _inverse_root(keys, float(scalar)),
    }


def _gemma3_gguf(keys: Keys, num_layers: int) -> Options:
    by_width = num_layers == 62
    heads = keys.required("attention.head_count", int)
    scalar = (
        keys.required("embedding_length", int) / max(heads, 1)
        if by_width
        else keys.required("attention.key_length", int)
    )
    window = keys.required("attention.sliding_window", int)
    return {
        **_gemma_gguf(keys, num_layers),
        **sliding(window, _not_every(keys, num_layers, _gguf_pattern(keys, 6))),
        "local_rope_theta": keys.optional("rope.freq_base_swa", float) or 10_000.0,
        "attention_scale": _inverse_root(keys, float(scalar)),
    }


def _gguf_pattern(keys: Keys, usual: int) -> int:
    return keys.optional("attention.sliding_window_pattern", int) or usual


def _root(width: int) -> float:
    return math.sqrt(width) if 0 < width < 2**31 else 0.0  # the width itself is refused


def _inverse_root(keys: Keys, scalar: float) -> float:
    if not scalar > 0:
        raise keys.bad(f"attention cannot be scaled by the root of {scalar!r}")
    return float(scalar**-0.5)


_GEMMA_HF_TENSORS = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "post_attention_layernorm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
_NO_BIAS = {"attention_bias": "biases of the attention output", "mlp_bias": "biases of the MLP"}

ARCHITECTURES = (
    Architecture(
        name="llama",  # 2, 3.x and SmolLM2
        hf_class="LlamaForCausalLM",
        gguf_name="llama",
        gguf_pairing="interleaved",
        refused=_NO_BIAS,
    ),
    Architecture(
        name="smollm3",
        hf_class="SmolLM3ForCausalLM",
        gguf_name="smollm3",
        gguf_pairing="interleaved",
        hf_defaults={
            "tie_word_embeddings": True,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
        },
        hf_options=_smollm3_hf,
        gguf_options=_smollm3_gguf,
        refused=_NO_BIAS,
    ),
    Architecture(
        name="mistral",
        hf_class="MistralForCausalLM",
        gguf_name="llama",  # without a window, as llama.cpp has it
        gguf_pairing="interleaved",
        hf_defaults={"sliding_window": 4096},
        hf_options=_all_sliding,
        refused=_NO_BIAS,
    ),
    Architecture(
        name="qwen2",  # and 2.5
        hf_class="Qwen2ForCausalLM",
        gguf_name="qwen2",
        options={"qkv_bias": True},
        hf_defaults={"max_window_layers": 28},
        hf_options=_qwen_sliding,
        refused={"mlp_bias": _NO_BIAS["mlp_bias"]},
    ),
    Architecture(
        name="qwen3",
        hf_class="Qwen3ForCausalLM",
        gguf_name="qwen3",
        options={"qk_norm": True},
        hf_defaults={"head_dim": 128, "max_window_layers": 28},
        hf_options=_qwen_sliding,
        refused=_NO_BIAS,
    ),
    Architecture(
        name="gemma2",
        hf_class="Gemma2ForCausalLM",
        gguf_name="gemma2",
        options={"post_norms": True, "activation": "gelu_tanh"},
        hf_defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        hf_options=_gemma2_hf,
        gguf_options=_gemma2_gguf,
        hf_tensors=_GEMMA_HF_TENSORS,
        hf_norm_offset=1.0,
        refused=_NO_BIAS | {"use_bidirectional_attention": "attention to later positions"},
    ),
    Architecture(
        name="gemma3",  # its text model
        hf_class="Gemma3ForCausalLM",
        gguf_name="gemma3",
        options={"post_norms": True, "activation": "gelu_tanh", "qk_norm": True},
        hf_defaults={
            "tie_word_embeddings": True,
            "head_dim": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        hf_options=_gemma_hf,
        gguf_options=_gemma3_gguf,
        hf_tensors=_GEMMA_HF_TENSORS,
        hf_norm_offset=1.0,
        refused=_NO_BIAS | {"use_bidirectional_attention": "attention to later positions"},
    ),
    Architecture(
        name="phi3",
        hf_class="Phi3ForCausalLM",
        gguf_name="phi3",
        hf_options=_all_sliding,
        gguf_options=_gguf_all_sliding,
        hf_tensors={
            "q_proj": "self_attn.qkv_proj.weight",
            "k_proj": "self_attn.qkv_proj.weight",
            "v_proj": "self_attn.qkv_proj.weight",
            "gate_proj": "mlp.gate_up_proj.weight",
            "up_proj": "mlp.gate_up_proj.weight",
        },
        gguf_tensors={
            "q_proj": "attn_qkv.weight",
            "k_proj": "attn_qkv.weight",
            "v_proj": "attn_qkv.weight",
            "gate_proj": "ffn_up.weight",
            "up_proj": "ffn_up.weight",
        },
        refused=_NO_BIAS,
    ),
)
BY_HF_CLASS = {a.hf_class: a for a in ARCHITECTURES}
# Of several of one GGUF name the first: the file tells them apart by nothing.
BY_GGUF_NAME = {a.gguf_name: a for a in reversed(ARCHITECTURES)}
