"""Hugging Face's config.json as a `ModelConfig`. Knows no tensor and no file.

Keys: https://huggingface.co/docs/transformers/main/en/main_classes/configuration. Those of before
version 5 (`rope_theta`, `rope_scaling`) and those since (`rope_parameters`) are read alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import ModelError
from shared.formats.architectures import ARCHITECTURES, BY_HF_CLASS, Architecture, Options
from shared.formats.keys import Keys
from shared.model.config import ModelConfig
from shared.model.rope import RopeScaling, longrope_attention_factor, yarn_attention_factor

MAX_LAYERS = 1 << 12
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
# What a dense decoder has not, by keys that tell of it.
_REFUSED_COUNTS = {
    "num_experts": "mixtures of experts",
    "num_local_experts": "mixtures of experts",
    "n_routed_experts": "mixtures of experts",
    "kv_lora_rank": "latent attention (MLA)",
    "q_lora_rank": "latent attention (MLA)",
}


def architecture_of(raw: Mapping[str, Any], source: str) -> Architecture:
    """The architecture that a config.json names; raises `ModelError` for one that is not there."""
    keys = Keys(source, "key", raw)
    classes = keys.items("architectures", str)
    if not classes:
        raise keys.bad("key architectures is missing")
    for name in classes:
        if name in BY_HF_CLASS:
            return BY_HF_CLASS[name]
    raise ModelError(
        f"{source} has architecture {classes[0]!r:.60}; "
        f"supported: {', '.join(a.hf_class for a in ARCHITECTURES)}",
        remedy="give a model of a supported architecture",
    )


def read_hf_config(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """The config of a model from the values of its config.json, whose name is `source`.

    Raises `ModelError` naming the key and the value that cannot be used.
    """
    architecture = architecture_of(raw, source)
    values = {**architecture.hf_defaults, **raw}
    keys = Keys(source, "key", values, whole_floats=True)
    _refuse_unsupported(keys, architecture)
    num_layers = keys.required("num_hidden_layers", int)
    if not 1 <= num_layers <= MAX_LAYERS:  # before a loop over them
        raise keys.bad(f"num_hidden_layers must be in 1..{MAX_LAYERS}, got {num_layers!r:.40}")
    hidden, heads = keys.required("hidden_size", int), keys.required("num_attention_heads", int)
    if heads < 1:
        raise keys.bad(f"num_attention_heads must be at least 1, got {heads!r:.40}")
    head_dim = keys.optional("head_dim", int) or hidden // heads
    act_key = "hidden_activation" if values.get("hidden_activation") else "hidden_act"
    act = keys.optional(act_key, str) or "silu"
    if act not in ACTIVATIONS:
        raise keys.bad(f"{act_key} {act!r:.40} is not one of {', '.join(ACTIVATIONS)}")
    bos = _token_ids(keys, "bos_token_id")
    options: Options = {
        **architecture.options,
        **architecture.hf_options(keys, num_layers),
        **_rope_options(keys, head_dim),
        "activation": ACTIVATIONS[act],
    }
    try:
        return ModelConfig(
            architecture=architecture.name,
            vocab_size=keys.required("vocab_size", int),
            hidden_size=hidden,
            intermediate_size=keys.required("intermediate_size", int),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=keys.optional("num_key_value_heads", int) or heads,
            head_dim=head_dim,
            rms_norm_eps=keys.required("rms_norm_eps", float),
            rope_pairing="half",
            max_position_embeddings=keys.required("max_position_embeddings", int),
            tie_word_embeddings=keys.optional("tie_word_embeddings", bool) or False,
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=_token_ids(keys, "eos_token_id"),
            **options,
        )
    except ModelError as error:  # named a field; the file is known here
        raise error if error.remedy else keys.bad(str(error)) from error


def _refuse_unsupported(keys: Keys, architecture: Architecture) -> None:
    for key, what in _REFUSED_COUNTS.items():
        if keys.values.get(key):
            raise keys.bad(f"key {key}: {what} are not supported")
    for key, what in architecture.refused.items():
        if keys.optional(key, bool):
            raise keys.bad(f"key {key}: {what} are not supported")
    if keys.values.get("quantization_config"):
        raise keys.bad(
            "key quantization_config: weights that were quantised by others are not supported"
        )


def _token_ids(keys: Keys, key: str) -> tuple[int, ...]:
    """One token id, a list of them, or none."""
    if isinstance(keys.values.get(key), list):
        return tuple(dict.fromkeys(keys.items(key, int) or ()))
    token_id = keys.optional(key, int)
    return () if token_id is None else (token_id,)


def _rope_options(keys: Keys, head_dim: int) -> Options:
    parameters = keys.inner("rope_parameters")
    local: float | None = None
    if parameters is not None and parameters.inner("full_attention") is not None:
        local_keys = _require_inner(parameters, "sliding_attention")
        _require_unscaled(local_keys)
        local = local_keys.required("rope_theta", float)
        parameters = _require_inner(parameters, "full_attention")
    else:
        local = keys.optional("rope_local_base_freq", float)
    theta: float | None
    if parameters is not None:
        theta = parameters.optional("rope_theta", float)
        theta = theta or keys.optional("rope_theta", float) or 10_000.0
    else:
        theta = keys.optional("rope_theta", float) or 10_000.0
        parameters = keys.inner("rope_scaling")
    options: Options = {"rope_theta": theta, "local_rope_theta": local}
    part = parameters.optional("partial_rotary_factor", float) if parameters else None
    part = part or keys.optional("partial_rotary_factor", float)
    if part is not None and part != 1.0:
        if not 0 < part < 1:
            raise keys.bad(f"partial_rotary_factor must be over 0 and at most 1, got {part!r}")
        options["rope_dim"] = int(head_dim * part)
    if parameters is not None and (scaling := _scaling(keys, parameters)) is not None:
        options["rope_scaling"] = scaling
    return options


def _require_inner(keys: Keys, key: str) -> Keys:
    inner = keys.inner(key)
    if inner is None:
        raise keys.bad(f"key {keys.prefix}{key} is missing")
    return inner


def _require_unscaled(keys: Keys) -> None:
    kind = keys.optional("rope_type", str) or keys.optional("type", str)
    if kind not in (None, "default"):
        raise keys.bad(f"{keys.prefix}rope_type {kind!r:.40}: local layers cannot be scaled")


def _scaling(keys: Keys, parameters: Keys) -> RopeScaling | None:
    kind = parameters.optional("rope_type", str) or parameters.optional("type", str) or "default"
    if keys.values.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # its names before there was one
    original = parameters.optional("original_max_position_embeddings", int)
    original = original or keys.optional("original_max_position_embeddings", int)
    positions = keys.required("max_position_embeddings", int)
    if not 1 <= positions < 2**31:
        raise keys.bad(f"max_position_embeddings must be in 1..{2**31 - 1}, got {positions!r:.40}")
    original = original or positions
    attention = parameters.optional("attention_factor", float)
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return RopeScaling("linear", parameters.required("factor", float))
            case "llama3":
                return RopeScaling(
                    "llama3",
                    parameters.required("factor", float),
                    original,
                    low_freq_factor=parameters.required("low_freq_factor", float),
                    high_freq_factor=parameters.required("high_freq_factor", float),
                )
            case "yarn":
                return _yarn(parameters, original, attention)
            case "longrope":
                factor = parameters.optional("factor", float) or positions / max(original, 1)
                return RopeScaling(
                    "longrope",
                    factor,
                    original,
                    attention or longrope_attention_factor(factor, original),
                    short_factors=tuple(parameters.items("short_factor", float) or ()),
                    long_factors=tuple(parameters.items("long_factor", float) or ()),
                )
    except ModelError as error:
        raise error if error.remedy else keys.bad(str(error)) from error
    raise keys.bad(f"rope scaling {kind!r:.40} is not supported")


def _yarn(parameters: Keys, original: int, attention: float | None) -> RopeScaling:
    factor = parameters.required("factor", float)
    if attention is None:
        mscale = parameters.optional("mscale", float)
        all_dim = parameters.optional("mscale_all_dim", float)
        attention = yarn_attention_factor(factor)
        if mscale and all_dim:
            whole = yarn_attention_factor(factor, all_dim)
            if not whole > 0:
                raise parameters.bad(f"{parameters.prefix}mscale_all_dim is {all_dim!r}")
            attention = yarn_attention_factor(factor, mscale) / whole
    truncate = parameters.optional("truncate", bool)
    return RopeScaling(
        "yarn",
        factor,
        original,
        attention,
        beta_fast=parameters.optional("beta_fast", float) or 32.0,
        beta_slow=parameters.optional("beta_slow", float) or 1.0,
        truncate=truncate is None or truncate,
    )
