"""One description of a model, whatever file it came from. Knows no file format and no chunk layout.

Tensors are lazy: a `TensorView` knows its name, kind and shape, and reads its numbers when asked.

R rows (outputs), C cols (inputs), G = C / 32 groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shared.formats.reading import is_lossless, kernel_kind, read_float32, read_rows
from shared.formats.stored_tensor import StoredTensor
from shared.kernel.matrix import Float32
from shared.manifest import TensorKind
from shared.model.config import ModelConfig
from shared.quant.blocks import Int4Blocks as Int4Blocks
from shared.quant.blocks import Int8Blocks as Int8Blocks
from shared.quant.blocks import TensorNumbers
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
QKV_BIASES = ("q_bias", "k_bias", "v_bias")
QK_NORMS = ("q_norm", "k_norm")
POST_NORMS = ("attention_out_norm", "mlp_out_norm")


def _nothing_to_release(start: int, stop: int) -> None:
    """Of numbers that lie in no file."""


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor of a model file, unread. A vector has rows 1.

    `source_name` and `source_type` are the file's own words, for messages. `read_rows(start, stop)`
    gives `Int4Blocks`, `Int8Blocks` or float32 (stop - start, C) according to `kind`, and
    `read_float32(start, stop)` what the file itself says, before it was brought into that form.
    Both raise `ModelError` for numbers that are not finite. `is_lossless`: they are the same
    numbers. `release(start, stop)` lets go of the memory of rows once nobody needs them: what was
    read may be a view of the file.
    """

    name: str
    kind: TensorKind
    rows: int
    cols: int
    source_name: str
    source_type: str
    read_rows: Callable[[int, int], TensorNumbers]
    read_float32: Callable[[int, int], Float32]
    is_lossless: bool = True
    release: Callable[[int, int], None] = _nothing_to_release

    def read(self) -> TensorNumbers:
        """The whole tensor at once."""
        return self.read_rows(0, self.rows)


def tensor_view(
    name: str,
    tensor: StoredTensor,
    rows: int,
    cols: int,
    kind: TensorKind | None = None,
    *,
    first_row: int = 0,
) -> TensorView:
    """A view of rows first_row..first_row + rows of a stored tensor.

    `kind` is the kernel format to keep it in: float32 for vectors, and for a matrix what its type
    becomes (`shared.formats.reading.KERNEL_KINDS`), unless another is given. Raises `ModelError`
    for a type that is not read.
    """
    usual = kernel_kind(tensor)
    kind = kind or (TensorKind.F32 if len(tensor.shape) == 1 else usual)

    def rows_in_kind(start: int, stop: int) -> TensorNumbers:
        return read_rows(tensor, kind, first_row + start, first_row + stop)

    def rows_as_float32(start: int, stop: int) -> Float32:
        return read_float32(tensor, first_row + start, first_row + stop)

    def release(start: int, stop: int) -> None:
        tensor.release(first_row + start, first_row + stop)

    return TensorView(
        name,
        kind,
        rows,
        cols,
        tensor.name,
        tensor.type_name,
        rows_in_kind,
        rows_as_float32,
        is_lossless(tensor, kind),
        release,
    )


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A model file as cellpipe sees it.

    `tensors` are keyed `embed_tokens`, `norm`, `lm_head` (unless tied) and `layer.<i>.<name>` with
    the names of `layer_tensors`. `source` is the file's name without its folder.
    """

    source: str
    config: ModelConfig
    tensors: Mapping[str, TensorView]
    vocabulary: AnyVocabulary
    chat_template: str | None


def layer_tensor(layer: int, name: str) -> str:
    """Key of a layer's tensor in `ModelDescription.tensors`."""
    return f"layer.{layer}.{name}"


def layer_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Names of the tensors of a layer of this config: those of a llama, then its options'."""
    return (
        *LAYER_TENSORS,
        *(QKV_BIASES if config.qkv_bias else ()),
        *(QK_NORMS if config.qk_norm else ()),
        *(POST_NORMS if config.post_norms else ()),
    )


def is_vector(name: str) -> bool:
    """Whether a tensor of ours is a vector: norms and biases, which stay binary32."""
    return name.endswith(("norm", "bias"))


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
        "q_bias": (1, config.q_dim),
        "k_bias": (1, config.kv_dim),
        "v_bias": (1, config.kv_dim),
        "q_norm": (1, config.head_dim),
        "k_norm": (1, config.head_dim),
        "attention_out_norm": (1, hidden),
        "mlp_out_norm": (1, hidden),
    }
    shapes = {EMBEDDING_TENSOR: (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes |= {layer_tensor(index, name): layer[name] for name in layer_tensors(config)}
    shapes[FINAL_NORM_TENSOR] = (1, hidden)
    if not config.tie_word_embeddings:
        shapes[HEAD_TENSOR] = (config.vocab_size, hidden)
    return shapes
