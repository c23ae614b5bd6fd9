"""The tokenizer in a GGUF file as a `Vocabulary`. Knows no tensors and no tokenizer library.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer. What a file does not say
is as llama.cpp has it (src/llama-vocab.cpp, `llama_vocab::impl::load`).
"""

from __future__ import annotations

import math
from typing import TypeVar

from shared.errors import ModelError
from shared.formats.gguf_file import GgufFile
from shared.text.vocabulary import Vocabulary
from shared.text.vocabulary_json import default_add_bos

T = TypeVar("T", int, float, str, bool)

_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2}


def read_gguf_vocabulary(file: GgufFile, vocab_size: int) -> Vocabulary:
    """Read the tokenizer of a model whose embedding has `vocab_size` rows.

    Raises `ModelError` naming a key that is missing, malformed, or at odds with the others. Whether
    the tokenizer itself can be used says `Tokenizer.from_vocabulary`.
    """
    tokens = _items(file, "tokens", str)
    if len(tokens) != vocab_size:
        raise _bad(
            file,
            f"tokenizer.ggml.tokens has {len(tokens)} tokens, the embedding {vocab_size} rows",
        )
    model = _optional(file, "model", str)
    if model is None:
        raise _bad(file, "metadata key tokenizer.ggml.model is missing")
    pre = _optional(file, "pre", str) or "default"
    is_sentencepiece = model == "llama"
    bos, eos, *_ = (
        _special_id(file, name, model, len(tokens)) for name in ("bos", "eos", "eot", "eom")
    )
    add_bos = _optional(file, "add_bos_token", bool)
    add_space_prefix = _optional(file, "add_space_prefix", bool)
    return Vocabulary(
        model=model,
        pre=pre,
        tokens=tuple(tokens),
        token_types=tuple(_items(file, "token_type", int, len(tokens))),
        merges=() if is_sentencepiece else tuple(_items(file, "merges", str)),
        bos_token_id=bos,
        eos_token_id=eos,
        add_bos=default_add_bos(model, pre) if add_bos is None else add_bos,
        scores=_scores(file, len(tokens)) if is_sentencepiece else (),
        add_space_prefix=is_sentencepiece if add_space_prefix is None else add_space_prefix,
    )


def _special_id(file: GgufFile, name: str, model: str, num_tokens: int) -> int | None:
    token_id = _optional(file, f"{name}_token_id", int)
    if token_id is None and model == "llama":
        token_id = _SENTENCEPIECE_IDS.get(name)
    if token_id is not None and not 0 <= token_id < num_tokens:
        raise _bad(file, f"special token id {token_id} ({name}) is outside the vocabulary")
    return token_id


def _scores(file: GgufFile, num_tokens: int) -> tuple[float, ...]:
    scores = _items(file, "scores", float, num_tokens)
    wrong = next((i for i, score in enumerate(scores) if not math.isfinite(score)), None)
    if wrong is not None:
        raise _bad(file, f"tokenizer.ggml.scores[{wrong}] is {scores[wrong]}")
    return tuple(scores)


def _optional(file: GgufFile, name: str, kind: type[T]) -> T | None:
    """The value of a key, None when it is absent; raises `ModelError` for another type."""
    key = f"tokenizer.ggml.{name}"
    value = file.metadata.get(key)
    # type(), not isinstance: bool passes for int.
    if value is not None and type(value) is not kind:
        raise _bad(file, f"metadata key {key} must be {kind.__name__}, got {value!r:.60}")
    return value


def _items(file: GgufFile, name: str, kind: type[T], number: int | None = None) -> list[T]:
    """The list under a key; raises `ModelError` unless it is there, of `number`, and of `kind`."""
    key = f"tokenizer.ggml.{name}"
    value = file.metadata.get(key)
    if not isinstance(value, list) or (value and type(value[0]) is not kind):
        raise _bad(file, f"metadata key {key} must be an array of {kind.__name__}")
    if number is not None and len(value) != number:
        raise _bad(file, f"{key} has {len(value)} of {number} entries")
    return value


def _bad(file: GgufFile, what: str) -> ModelError:
    return ModelError(f"{file.path.name}: {what}", remedy="give a model file that cellpipe can run")
