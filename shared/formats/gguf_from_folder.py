"""Writes a model of a Hugging Face folder as a GGUF file, its tensors in the type that they have.

What the file says is read back and held against the folder: a model that GGUF's keys, or those that
are written here, cannot tell of is refused by name, and nothing is left behind. Tokenizers are
byte-level BPE with a pre-tokenizer that GGUF has a name for.

hd head_dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from shared.errors import ModelError
from shared.formats.architectures import ARCHITECTURES, Architecture
from shared.formats.description import ModelDescription, TensorView, is_vector
from shared.formats.gguf import read_gguf
from shared.formats.gguf_copy import cannot_write
from shared.formats.placement import places
from shared.kernel.matrix import Float32
from shared.model.config import ModelConfig
from shared.text.pre_tokenizers import PRE_TOKENIZERS
from shared.text.vocabulary import TokenizerFile, TokenType

REMEDY = "give a GGUF file of it, as llama.cpp's convert_hf_to_gguf.py makes"
_GPT2_SPLIT = PRE_TOKENIZERS["gpt-2"].patterns[0]
_DIGITS = PRE_TOKENIZERS["starcoder"].patterns[0]


def write_gguf_from(description: ModelDescription, target: Path) -> None:
    """Write the model of a folder to `target`. One tensor is in memory.

    Raises `ModelError` naming what GGUF cannot hold of it, or why it cannot be written.
    """
    architecture = next(a for a in ARCHITECTURES if a.name == description.config.architecture)
    config = replace(description.config, rope_pairing=architecture.gguf_pairing)
    if not isinstance(description.vocabulary, TokenizerFile):
        raise _bad(description, "its tokenizer is no tokenizer.json")
    writer = gguf.GGUFWriter(str(target), architecture.gguf_name)
    try:
        _add_config(writer, architecture.gguf_name, config)
        _add_tokenizer(writer, description, description.vocabulary)
        _add_tensors(writer, description, architecture, config)
        writer.close()
        _check(description, config, target)
    except BaseException as error:
        with contextlib.suppress(OSError):  # a full disk is met again when the rest is written
            writer.close()
        target.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(target, error) from error
        raise


def _add_config(writer: gguf.GGUFWriter, name: str, config: ModelConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.rope_dim or config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_vocab_size(config.vocab_size)
    if config.rope_scaling is not None and config.rope_scaling.kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)


def _add_tokenizer(
    writer: gguf.GGUFWriter, description: ModelDescription, vocabulary: TokenizerFile
) -> None:
    document = vocabulary.document
    model = document["model"]
    is_byte_level = (document.get("decoder") or {}).get("type") == "ByteLevel"
    if model.get("type") != "BPE" or model.get("byte_fallback") or not is_byte_level:
        raise _bad(description, "its tokenizer is no byte-level BPE")
    tokens = [f"[PAD{i}]" for i in range(vocabulary.vocab_size)]
    types = [int(TokenType.UNUSED)] * len(tokens)
    for token, index in model["vocab"].items():
        tokens[index], types[index] = token, int(TokenType.NORMAL)
    for added in document.get("added_tokens") or ():
        kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], int(kind)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if not merges:  # which GGUF's own package cannot write
        raise _bad(description, "its tokenizer has no merges")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_name(description, document))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    ends = dict(zip(("eos", "eot", "eom"), description.config.eos_token_ids, strict=False))
    if description.config.bos_token_id is not None:
        writer.add_bos_token_id(description.config.bos_token_id)
    for name, token_id in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token_id)
    writer.add_add_bos_token(vocabulary.add_bos)
    if description.chat_template is not None:
        writer.add_chat_template(description.chat_template)


def _pre_name(description: ModelDescription, document: Mapping[str, Any]) -> str:
    """GGUF's name of the rules by which a tokenizer.json splits a text."""
    patterns = _patterns(document.get("pre_tokenizer") or {})
    ignores = bool(document["model"].get("ignore_merges"))
    normalizer = document.get("normalizer")
    kind = None if normalizer is None else normalizer.get("type")
    for name, known in PRE_TOKENIZERS.items():
        known_kind = None if known.normalizer is None else known.normalizer["type"]
        if (known.patterns, known.ignore_merges, known_kind) == (patterns, ignores, kind):
            return name
    raise _bad(description, "GGUF has no name for the way in which its tokenizer splits a text")


def _patterns(rule: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The expressions of a pre-tokenizer, None for one that has other rules."""
    found: list[str] = []
    for part in rule.get("pretokenizers", [rule]):
        match part:
            case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"}:
                found.append(regex)
            case {"type": "Digits", "individual_digits": True}:
                found.append(_DIGITS)
            case {"type": "ByteLevel", "add_prefix_space": False}:
                found += [_GPT2_SPLIT] if part.get("use_regex", True) else []
            case _:
                return None
    return tuple(found)


def _add_tensors(
    writer: gguf.GGUFWriter,
    description: ModelDescription,
    architecture: Architecture,
    config: ModelConfig,
) -> None:
    where = places(architecture, config, "gguf")
    views = description.tensors
    kinds = {key: _type_of(view) for key, view in views.items()}
    for key, view in views.items():
        place = where[key]
        shape = (view.cols,) if is_vector(key) else (view.rows, view.cols)
        if place.source_shape != shape or place.order is not None:
            raise _bad(
                description, f"{key} would lie in one tensor with others, which is not written"
            )
        size = 4 if kinds[key] == gguf.GGMLQuantizationType.F32 else 2
        byte_shape = (*shape[:-1], shape[-1] * size)
        writer.add_tensor_info(
            place.source, byte_shape, np.dtype(np.uint8), int(np.prod(byte_shape)), kinds[key]
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for key, view in views.items():
        rows = view.read_float32(0, view.rows)
        if config.rope_pairing != description.config.rope_pairing and key.endswith(
            ("q_proj", "k_proj")
        ):
            rows = _interleaved(rows, config.head_dim)
        writer.write_tensor_data(gguf.quants.quantize(rows, kinds[key]).view(np.uint8))
        view.release(0, view.rows)


def _type_of(view: TensorView) -> gguf.GGMLQuantizationType:
    """Vectors are F32 in GGUF; a matrix keeps its type, so that nothing is rounded."""
    if is_vector(view.name):
        return gguf.GGMLQuantizationType.F32
    return gguf.GGMLQuantizationType[view.source_type]


def _interleaved(rows: Float32, head_dim: int) -> Float32:
    """Rows of q or k whose pairs lie hd/2 apart, with the pairs side by side."""
    halves = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _check(description: ModelDescription, config: ModelConfig, target: Path) -> None:
    """Raise `ModelError` unless the file says of the model what the folder does."""
    written = read_gguf(target).config
    for field in fields(ModelConfig):
        ours, theirs = getattr(written, field.name), getattr(config, field.name)
        if field.name == "architecture":
            continue  # several are one in GGUF
        same = (
            np.float32(ours) == np.float32(theirs)
            if isinstance(theirs, float)
            else (ours == theirs)
        )  # GGUF's numbers are binary32
        if not same:
            raise _bad(description, f"no GGUF key is written for {field.name} {theirs!r:.80}")


def _bad(description: ModelDescription, what: str) -> ModelError:
    return ModelError(f"{description.source} cannot be written as GGUF: {what}", remedy=REMEDY)
