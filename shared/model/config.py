"""The description of a dense decoder that the kernel can run. Knows no file format.

Names are Hugging Face's. One description per model, small and declarative: the kernel gets sizes
and options, never an architecture's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from shared.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of a model.

    `rope_pairing` says which elements of a head rotate together: "interleaved" (2i, 2i+1), as llama
    GGUF files are permuted, or "half" (i, i + head_dim/2), as Hugging Face stores them.
    `max_position_embeddings` is how many positions the rope shard holds.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_pairing: Literal["interleaved", "half"]
    max_position_embeddings: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and not 1 <= value < 2**31:
                raise ModelError(f"{field.name} must be positive, got {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ModelError(f"{name} must be positive and finite, got {value!r}")
        for name in ("hidden_size", "intermediate_size", "kv_dim", "q_dim"):
            if getattr(self, name) % 32:
                raise ModelError(f"{name} must be a multiple of 32, got {getattr(self, name)}")
        if self.head_dim % 8:
            raise ModelError(f"head_dim must be a multiple of 8, got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.rope_pairing not in ("interleaved", "half"):
            raise ModelError(f"rope_pairing must be interleaved or half, got {self.rope_pairing!r}")

    @property
    def q_dim(self) -> int:
        return self.num_attention_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.num_key_value_heads * self.head_dim

    @property
    def kv_row_bytes_per_layer(self) -> int:
        """Bytes of fp16 keys and values of one position in one layer."""
        return 2 * 2 * self.kv_dim

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build from `to_dict`'s output (or its JSON). Raises `ModelError` naming the key."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(raw) - names):
            raise ModelError(f"unknown keys in the model config: {', '.join(unknown)}")
        if missing := sorted(names - set(raw)):
            raise ModelError(f"keys missing in the model config: {', '.join(missing)}")
        values = dict(raw)
        try:
            values["eos_token_ids"] = tuple(values["eos_token_ids"])
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"a value of the model config has the wrong type: {error}") from error
