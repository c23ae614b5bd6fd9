"""Writes tiny GGUF files for tests, right or wrong in one chosen place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from shared.text.vocabulary import Vocabulary

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_REMOVED = object()


def removed() -> Any:
    """Marks a metadata key or tensor to leave out of the file."""
    return _REMOVED


def byte_alphabet() -> list[str]:
    """GPT-2's 256 byte characters, in the order of their code points."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [chr(b) for b in visible] + [chr(256 + n) for n in range(256 - len(visible))]


def tiny_tokens() -> list[str]:
    return [*SPECIAL_TOKENS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_vocabulary() -> Vocabulary:
    num_others = len(tiny_tokens()) - len(SPECIAL_TOKENS)
    return Vocabulary(
        model="gpt2",
        pre="smollm",
        tokens=tuple(tiny_tokens()),
        token_types=(3,) * len(SPECIAL_TOKENS) + (1,) * num_others,
        merges=MERGES,
        bos_token_id=1,
        eos_token_id=2,
        add_bos=False,
    )


@dataclass(frozen=True)
class TinyModel:
    """A llama with random weights from a seed. `metadata` and `tensors` replace, add or remove."""

    hidden: int = 64
    inner: int = 96
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    context: int = 128
    matrix_type: str = "Q4_1"
    embedding_type: str = "Q8_0"
    tied: bool = True
    architecture: str = "llama"
    seed: int = 7
    metadata: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab(self) -> int:
        return len(tiny_tokens())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        head_dim = self.hidden // self.heads
        kv = self.kv_heads * head_dim
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, self.hidden)}
        for i in range(self.layers):
            shapes |= {
                f"blk.{i}.attn_norm.weight": (self.hidden,),
                f"blk.{i}.attn_q.weight": (self.hidden, self.hidden),
                f"blk.{i}.attn_k.weight": (kv, self.hidden),
                f"blk.{i}.attn_v.weight": (kv, self.hidden),
                f"blk.{i}.attn_output.weight": (self.hidden, self.hidden),
                f"blk.{i}.ffn_norm.weight": (self.hidden,),
                f"blk.{i}.ffn_gate.weight": (self.inner, self.hidden),
                f"blk.{i}.ffn_up.weight": (self.inner, self.hidden),
                f"blk.{i}.ffn_down.weight": (self.hidden, self.inner),
            }
        shapes["output_norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["output.weight"] = (self.vocab, self.hidden)
        return shapes

    def weights(self) -> dict[str, np.ndarray]:
        """float32 weights as they were before quantisation."""
        rng = np.random.default_rng(self.seed)
        return {
            name: np.float32(rng.normal(0, 0.2, shape) + (len(shape) == 1))
            for name, shape in self.shapes().items()
        }

    def type_of(self, name: str) -> str:
        if name.endswith("norm.weight"):
            return "F32"
        return self.embedding_type if name.startswith(("token", "output.")) else self.matrix_type


def write_gguf(path: Path, model: TinyModel | None = None) -> Path:
    """Write a tiny model and return its path. Replaced tensors are (array, type name)."""
    model = model or TinyModel()
    tensors: dict[str, Any] = {
        name: (values, model.type_of(name)) for name, values in model.weights().items()
    }
    return write_items(path, model.architecture, _metadata(model), tensors | dict(model.tensors))


def write_items(
    path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]
) -> Path:
    """Write a file of just these metadata and tensors, (array, type name) each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in tensors.items():
        if tensor is not _REMOVED:
            _add_tensor(writer, name, *tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(model: TinyModel) -> dict[str, Any]:
    tokens = tiny_tokens()
    a = model.architecture
    metadata: dict[str, Any] = {
        f"{a}.block_count": model.layers,
        f"{a}.context_length": model.context,
        f"{a}.embedding_length": model.hidden,
        f"{a}.feed_forward_length": model.inner,
        f"{a}.attention.head_count": model.heads,
        f"{a}.attention.head_count_kv": model.kv_heads,
        f"{a}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{a}.rope.freq_base": 10_000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL_TOKENS)
        + [1] * (len(tokens) - len(SPECIAL_TOKENS)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return {k: v for k, v in (metadata | dict(model.metadata)).items() if v is not _REMOVED}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)
        case _:
            raise TypeError(f"{key}: {value!r}")


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    if values.dtype == np.uint8:  # blocks that a test made itself
        writer.add_tensor(name, values, raw_dtype=kind)
    elif type_name == "F32":
        writer.add_tensor(name, np.float32(values))
    elif type_name == "F16":
        writer.add_tensor(name, np.float16(values))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


# Where the fp16 scales and minima of a block lie; all else may be any bytes.
_HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "IQ4_NL": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
BLOCK_TYPES = tuple(_HALVES)


def random_blocks(type_name: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Blocks of any type with finite numbers, uint8 (rows, bytes of a row)."""
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, cols // block_values, block_bytes), np.uint8)
    for at in _HALVES[type_name]:
        halves = np.float16(rng.uniform(0.001, 0.02, blocks.shape[:2]))
        blocks[:, :, at : at + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)
