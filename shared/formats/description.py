"""One description of a model, whatever file it came from. Knows no file format and no chunk layout.

Tensors are lazy: a `TensorView` knows its name, kind and shape, and reads its numbers when asked.

R rows (outputs), C cols (inputs), G = C / 32 groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.manifest import TensorKind
from shared.model.config import ModelConfig
from shared.text.vocabulary import AnyVocabulary

GROUP_SIZE = 32

# Our tensor names. A layer's tensors are stored as `layer.<i>.<name>` in a description.
EMBEDDING_TENSOR = "embed_tokens"
FINAL_NORM_TENSOR = "norm"
HEAD_TENSOR = "lm_head"
LAYER_TENSORS = (
    "input_layernorm",
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "post_attention_layernorm",
    "gate_proj",
    "up_proj",
    "down_proj",
)


@dataclass(frozen=True, slots=True)
class Int4Blocks:
    """w = scale*q + min. `scale`, `min` float16 (R, G); `nibbles` uint8 (R, G, 16).

    Nibble byte j of a group holds q[j] in its low and q[16 + j] in its high half, as GGUF's Q4_0
    and Q4_1 do.
    """

    scale: npt.NDArray[np.float16]
    min: npt.NDArray[np.float16]
    nibbles: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Int8Blocks:
    """w = scale*q. `scale` float16 (R, G); `q` int8 (R, G, 32)."""

    scale: npt.NDArray[np.float16]
    q: npt.NDArray[np.int8]


TensorNumbers = Int4Blocks | Int8Blocks | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a model file, unread. A vector has rows 1.

    `source_name` and `source_type` are the file's own words, for messages. `read` gives
    `Int4Blocks`, `Int8Blocks` or float32 (R, C) according to `kind`; it raises `ModelError` for
    numbers that are not finite.
    """

    name: str
    kind: TensorKind
    rows: int
    cols: int
    source_name: str
    source_type: str
    read: Callable[[], TensorNumbers]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model file as cellpipe sees it.

    `tensors` are keyed `embed_tokens`, `norm`, `lm_head` (unless tied) and `layer.<i>.<name>` with
    the names of `LAYER_TENSORS`. `source` is the file's name without its folder.
    """

    source: str
    config: ModelConfig
    tensors: Mapping[str, TensorView]
    vocabulary: AnyVocabulary
    chat_template: str | None


def layer_tensor(layer: int, name: str) -> str:
    """Key of a layer's tensor in `ModelDescription.tensors`."""
    return f"layer.{layer}.{name}"


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(rows, cols) of every tensor that a model of this config has, by key."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = {
        "input_layernorm": (1, hidden),
        "q_proj": (config.q_dim, hidden),
        "k_proj": (config.kv_dim, hidden),
        "v_proj": (config.kv_dim, hidden),
        "o_proj": (hidden, config.q_dim),
        "post_attention_layernorm": (1, hidden),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    shapes = {EMBEDDING_TENSOR: (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes |= {layer_tensor(index, name): layer[name] for name in LAYER_TENSORS}
    shapes[FINAL_NORM_TENSOR] = (1, hidden)
    if not config.tie_word_embeddings:
        shapes[HEAD_TENSOR] = (config.vocab_size, hidden)
    return shapes
