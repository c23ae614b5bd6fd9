"""GGUF's metadata as a `ModelConfig`. Knows no tensor but those that hold rope factors.

Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from shared.errors import ModelError
from shared.formats.architectures import BY_GGUF_NAME, Architecture, Options
from shared.formats.gguf_file import GgufFile
from shared.formats.keys import Keys
from shared.formats.reading import read_float32
from shared.model.config import ModelConfig
from shared.model.rope import RopeScaling, yarn_attention_factor

WORD = "metadata key"
ROPE_FREQS = "rope_freqs.weight"
ROPE_SHORT, ROPE_LONG = "rope_factors_short.weight", "rope_factors_long.weight"
ROPE_TENSORS = (ROPE_FREQS, ROPE_SHORT, ROPE_LONG)  # of the config, not of a layer


def gguf_architecture(file: GgufFile) -> Architecture:
    """Raises `ModelError` for an architecture without a description."""
    name = Keys(file.path.name, WORD, file.metadata).required("general.architecture", str)
    if name not in BY_GGUF_NAME:
        raise ModelError(
            f"{file.path.name} has architecture {name!r:.60}; "
            f"supported: {', '.join(sorted(BY_GGUF_NAME))}",
            remedy="give a model of a supported architecture",
        )
    return BY_GGUF_NAME[name]


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Raises `ModelError` naming the key and the value that cannot be used."""
    architecture = gguf_architecture(file)
    prefix = f"{architecture.gguf_name}."
    keys = Keys(file.path.name, WORD, file.metadata, prefix)
    tokenizer = Keys(file.path.name, WORD, file.metadata, "tokenizer.ggml.")
    if keys.optional("expert_count", int):
        raise keys.bad(f"{prefix}expert_count: mixtures of experts are not supported")
    num_layers = keys.required("block_count", int)
    # Before anything is made per layer: a hostile count must not become a loop.
    if not 1 <= num_layers <= len(file.tensors):
        raise keys.bad(f"{prefix}block_count is {num_layers}, tensors: {len(file.tensors)}")
    hidden = keys.required("embedding_length", int)
    num_heads = keys.required("attention.head_count", int)
    if num_heads < 1:
        raise keys.bad(f"{prefix}attention.head_count is {num_heads}")
    head_dim = keys.optional("attention.key_length", int) or hidden // num_heads
    value_dim = keys.optional("attention.value_length", int)
    if value_dim not in (None, head_dim):
        raise keys.bad(f"{prefix}attention.value_length {value_dim} is not key_length {head_dim}")
    eos_ids = [tokenizer.optional(f"{key}_token_id", int) for key in ("eos", "eot", "eom")]
    theta = keys.optional("rope.freq_base", float)
    options: Options = {
        **architecture.options,
        **architecture.gguf_options(keys, num_layers),
        "rope_dim": _rope_dim(keys, head_dim),
    }
    try:
        return ModelConfig(
            architecture=architecture.name,
            vocab_size=_num_embeddings(file, keys),
            hidden_size=hidden,
            intermediate_size=keys.required("feed_forward_length", int),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=keys.optional("attention.head_count_kv", int) or num_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.required("attention.layer_norm_rms_epsilon", float),
            rope_theta=10_000.0 if theta is None else theta,
            rope_pairing=architecture.gguf_pairing,
            max_position_embeddings=keys.required("context_length", int),
            tie_word_embeddings="output.weight" not in file.tensors,
            bos_token_id=tokenizer.optional("bos_token_id", int),
            eos_token_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
            rope_scaling=_scaling(file, keys),
            **options,
        )
    except ModelError as error:  # named a field; the file and the remedy are known here
        raise error if error.remedy else keys.bad(str(error)) from error


def _num_embeddings(file: GgufFile, keys: Keys) -> int:
    tensor = file.tensors.get("token_embd.weight")
    if tensor is None:
        raise keys.bad("tensor token_embd.weight is missing")
    return tensor.shape[0]


def _rope_dim(keys: Keys, head_dim: int) -> int | None:
    rope_dim = keys.optional("rope.dimension_count", int)
    return None if rope_dim in (None, head_dim) else rope_dim


def _scaling(file: GgufFile, keys: Keys) -> RopeScaling | None:
    kind = keys.optional("rope.scaling.type", str) or "none"
    factor = keys.optional("rope.scaling.factor", float)
    attention = keys.optional("rope.scaling.attn_factor", float) or 1.0
    original = keys.optional("rope.scaling.original_context_length", int) or 0
    for key, usual in (
        ("yarn_log_multiplier", 0.0),
        ("yarn_ext_factor", 1.0),
        ("yarn_attn_factor", 1.0),
    ):
        value = keys.optional(f"rope.scaling.{key}", float)
        if value not in (None, usual):
            raise keys.bad(f"rope scaling: {key} {value} is not supported")
    linear = keys.optional("rope.scale_linear", float)  # of before there was a type
    if linear not in (None, 1.0):
        kind, factor = "linear", linear
    if ROPE_SHORT in file.tensors or ROPE_LONG in file.tensors:
        return RopeScaling(
            "longrope",
            original_max_position_embeddings=original,
            attention_factor=attention,
            short_factors=_numbers(file, keys, ROPE_SHORT),
            long_factors=_numbers(file, keys, ROPE_LONG),
        )
    if ROPE_FREQS in file.tensors:
        if kind != "none":
            raise keys.bad(f"rope scaling {kind:.40} beside tensor {ROPE_FREQS} is not supported")
        return RopeScaling("factors", short_factors=_numbers(file, keys, ROPE_FREQS))
    if kind == "none":
        return None
    if factor is None:
        raise keys.bad(f"{WORD} {keys.prefix}rope.scaling.factor is missing")
    match kind:
        case "linear":
            return RopeScaling("linear", factor)
        case "yarn":
            return RopeScaling(
                "yarn",
                factor,
                original or keys.required("context_length", int),
                attention * yarn_attention_factor(factor),
                beta_fast=keys.optional("rope.scaling.yarn_beta_fast", float) or 32.0,
                beta_slow=keys.optional("rope.scaling.yarn_beta_slow", float) or 1.0,
            )
    raise keys.bad(f"rope scaling {kind!r:.40} is not supported")


def _numbers(file: GgufFile, keys: Keys, name: str) -> tuple[float, ...]:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise keys.bad(f"tensor {name} is missing")
    if len(tensor.shape) != 1 or tensor.type_name != "F32":
        raise keys.bad(f"tensor {name} must be a vector of F32")
    return tuple(read_float32(tensor, 0, 1)[0].tolist())
