"""A llama-architecture GGUF file as a `ModelDescription`. Knows no chunk layout and no tokenizer.

What the kernel could not run exactly is refused by name: other architectures, other quantisations,
experts, biases, scaled or partial rope. Metadata keys:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from shared.errors import ModelError
from shared.formats.description import (
    EMBEDDING_TENSOR,
    FINAL_NORM_TENSOR,
    HEAD_TENSOR,
    LAYER_TENSORS,
    ModelDescription,
    TensorView,
    layer_tensor,
    tensor_shapes,
    tensor_view,
)
from shared.formats.gguf_file import GgufFile, open_gguf
from shared.formats.stored_tensor import StoredTensor
from shared.model.config import ModelConfig
from shared.text.vocabulary import Vocabulary

SUPPORTED_ARCHITECTURES = ("llama",)

_LAYER_SOURCES = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}
T = TypeVar("T", int, float, str, bool)


def read_gguf(path: Path) -> ModelDescription:
    """Describe the model in a GGUF file. Tensors are read when their views are asked to.

    Raises `ModelError` naming what cannot be used: the file, a key, or a tensor and its type.
    """
    file = open_gguf(path)
    config = _config(file)
    return ModelDescription(
        source=path.name,
        config=config,
        tensors=_views(file, config),
        vocabulary=_vocabulary(file, config),
        chat_template=_optional(file, "tokenizer.chat_template", str),
    )


def _config(file: GgufFile) -> ModelConfig:
    architecture = _required(file, "general.architecture", str)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ModelError(
            f"{file.path.name} has architecture {architecture!r:.60}; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}",
            remedy="give a model of a supported architecture",
        )
    _refuse_unsupported(file)
    num_layers = _required(file, "llama.block_count", int)
    # Before anything is made per layer: a hostile count must not become a loop.
    if not 1 <= num_layers <= len(file.tensors):
        raise _bad(file, f"llama.block_count is {num_layers}, tensors: {len(file.tensors)}")
    hidden = _required(file, "llama.embedding_length", int)
    num_heads = _required(file, "llama.attention.head_count", int)
    if num_heads < 1:
        raise _bad(file, f"llama.attention.head_count is {num_heads}")
    head_dim = _optional(file, "llama.attention.key_length", int) or hidden // num_heads
    value_dim = _optional(file, "llama.attention.value_length", int)
    if value_dim not in (None, head_dim):
        raise _bad(file, f"llama.attention.value_length {value_dim} is not key_length {head_dim}")
    rope_dim = _optional(file, "llama.rope.dimension_count", int)
    if rope_dim not in (None, head_dim):
        raise _bad(file, f"llama.rope.dimension_count {rope_dim} is not the head's {head_dim}")
    eos_ids = [
        _optional(file, f"tokenizer.ggml.{key}_token_id", int) for key in ("eos", "eot", "eom")
    ]
    eps = _required(file, "llama.attention.layer_norm_rms_epsilon", float)
    theta = _optional(file, "llama.rope.freq_base", float)
    try:
        return ModelConfig(
            architecture=architecture,
            vocab_size=_tensor(file, "token_embd.weight").shape[0],
            hidden_size=hidden,
            intermediate_size=_required(file, "llama.feed_forward_length", int),
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=_optional(file, "llama.attention.head_count_kv", int) or num_heads,
            head_dim=head_dim,
            rms_norm_eps=eps,
            rope_theta=10_000.0 if theta is None else theta,
            # llama.cpp's converter permutes the rows of q and k so that pairs lie side by side.
            rope_pairing="interleaved",
            max_position_embeddings=_required(file, "llama.context_length", int),
            tie_word_embeddings="output.weight" not in file.tensors,
            bos_token_id=_optional(file, "tokenizer.ggml.bos_token_id", int),
            eos_token_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        )
    except ModelError as error:  # named a field; the file and the remedy are known here
        raise _bad(file, str(error)) from error


def _refuse_unsupported(file: GgufFile) -> None:
    if _optional(file, "llama.expert_count", int):
        raise _bad(file, "llama.expert_count: mixtures of experts are not supported")
    scaling = _optional(file, "llama.rope.scaling.type", str)
    linear = _optional(file, "llama.rope.scale_linear", float)
    if (
        scaling not in (None, "none")
        or linear not in (None, 1.0)
        or "rope_freqs.weight" in (file.tensors)
    ):
        what = scaling or ("linear" if linear else "rope_freqs.weight")
        raise _bad(file, f"rope scaling ({what:.40}) is not supported")


def _views(file: GgufFile, config: ModelConfig) -> dict[str, TensorView]:
    sources = {EMBEDDING_TENSOR: "token_embd.weight", FINAL_NORM_TENSOR: "output_norm.weight"}
    for index in range(config.num_hidden_layers):
        for name in LAYER_TENSORS:
            sources[layer_tensor(index, name)] = f"blk.{index}.{_LAYER_SOURCES[name]}.weight"
    if not config.tie_word_embeddings:
        sources[HEAD_TENSOR] = "output.weight"
    if left_over := sorted(set(file.tensors) - set(sources.values())):
        raise _bad(file, f"tensor {left_over[0]!r:.80} has no place in a {config.architecture}")
    shapes = tensor_shapes(config)
    return {
        key: _view(file, key, shapes[key], _tensor(file, source)) for key, source in sources.items()
    }


def _view(file: GgufFile, key: str, shape: tuple[int, int], tensor: StoredTensor) -> TensorView:
    rows, cols = shape
    is_norm = rows == 1 and key.endswith("norm")
    wanted = (cols,) if is_norm else (rows, cols)
    if tensor.shape != wanted:
        raise _bad(file, f"tensor {tensor.name} has shape {tensor.shape}, not {wanted}")
    return tensor_view(key, tensor, rows, cols)


def _vocabulary(file: GgufFile, config: ModelConfig) -> Vocabulary:
    tokens = _items(file, "tokenizer.ggml.tokens", str)
    if len(tokens) != config.vocab_size:
        raise _bad(
            file,
            f"tokenizer.ggml.tokens has {len(tokens)} tokens, "
            f"the embedding {config.vocab_size} rows",
        )
    types = _items(file, "tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        raise _bad(file, f"tokenizer.ggml.token_type has {len(types)} of {len(tokens)} entries")
    for token_id in (config.bos_token_id, *config.eos_token_ids):
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise _bad(file, f"special token id {token_id} is outside the vocabulary")
    return Vocabulary(
        model=_required(file, "tokenizer.ggml.model", str),
        pre=_optional(file, "tokenizer.ggml.pre", str) or "default",
        tokens=tuple(tokens),
        token_types=tuple(types),
        merges=tuple(_items(file, "tokenizer.ggml.merges", str)),
        bos_token_id=config.bos_token_id,
        eos_token_id=_optional(file, "tokenizer.ggml.eos_token_id", int),
        add_bos=_optional(file, "tokenizer.ggml.add_bos_token", bool) or False,
    )


def _bad(file: GgufFile, what: str) -> ModelError:
    return ModelError(f"{file.path.name}: {what}", remedy="give a model file that cellpipe can run")


def _tensor(file: GgufFile, name: str) -> StoredTensor:
    tensor = file.tensors.get(name)
    if tensor is None:
        raise _bad(file, f"tensor {name} is missing")
    return tensor


def _required(file: GgufFile, key: str, kind: type[T]) -> T:
    value = _optional(file, key, kind)
    if value is None:
        raise _bad(file, f"metadata key {key} is missing")
    return value


def _optional(file: GgufFile, key: str, kind: type[T]) -> T | None:
    """The value of a key, None when it is absent; raises `ModelError` for another type."""
    value = file.metadata.get(key)
    # type(), not isinstance: bool passes for int, and an array of per-layer sizes for neither.
    if value is not None and type(value) is not kind:
        raise _bad(file, f"metadata key {key} must be {kind.__name__}, got {value!r:.60}")
    return value


def _items(file: GgufFile, key: str, kind: type[T]) -> list[T]:
    """The list under a key; raises `ModelError` unless it is there and holds `kind` alone."""
    value = file.metadata.get(key)
    if not isinstance(value, list) or (value and type(value[0]) is not kind):
        raise _bad(file, f"metadata key {key} must be an array of {kind.__name__}")
    return value
