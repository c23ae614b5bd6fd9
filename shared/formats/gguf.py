"""A GGUF file as a `ModelDescription`. Knows no chunk layout and no tokenizer.

What the kernel could not run exactly is refused by name: other architectures, other quantisations,
experts. Metadata keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from shared.errors import ModelError
from shared.formats.description import ModelDescription
from shared.formats.gguf_config import ROPE_TENSORS, gguf_architecture, read_gguf_config
from shared.formats.gguf_file import GgufFile, open_gguf
from shared.formats.placement import place_tensors
from shared.model.config import ModelConfig
from shared.text.vocabulary import Vocabulary

T = TypeVar("T", int, float, str, bool)


def read_gguf(path: Path) -> ModelDescription:
    """Describe the model in a GGUF file. Tensors are read when their views are asked to.

    Raises `ModelError` naming what cannot be used: the file, a key, or a tensor and its type.
    """
    file = open_gguf(path)
    config = read_gguf_config(file)
    tensors = {name: t for name, t in file.tensors.items() if name not in ROPE_TENSORS}
    return ModelDescription(
        source=path.name,
        config=config,
        tensors=place_tensors(path.name, gguf_architecture(file), config, "gguf", tensors),
        vocabulary=_vocabulary(file, config),
        chat_template=_optional(file, "tokenizer.chat_template", str),
    )


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
