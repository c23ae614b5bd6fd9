"""The description of a dense decoder that the kernel can run. Knows no file format.

Names are Hugging Face's. One description per model, small and declarative: the kernel gets sizes
and options, never an architecture's name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError
from shared.model.rope import RopeScaling, rope_tables


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and options of a model.

    `rope_pairing` says which elements of a head rotate together: "interleaved" (2i, 2i+1), as llama
    GGUF files are permuted, or "half" (i, i + head_dim/2), as Hugging Face stores them.
    `max_position_embeddings` is how many positions the rope shard holds.

    What has a default is an option; a model without any is a llama of the first kind:

    - `activation`: what the gate goes through; gelu_tanh is GELU's approximation by tanh.
    - `qkv_bias`: q, k and v have biases. `qk_norm`: each head of q and k is normalised before rope.
    - `post_norms`: what attention and MLP give is normalised before it is added.
    - `embedding_scale` multiplies embeddings; `attention_scale` scores, in place of
      1/sqrt(head_dim); a soft cap c makes x to c * tanh(x / c).
    - `sliding_layers` see the last `sliding_window` positions alone, the own one among them, and
      rotate by `local_rope_theta` without scaling, if there is one.
    - `rope_free_layers` do not rotate. `rope_dim`: so many dimensions of each head do; the others
      are the pairs behind them.
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
    activation: Literal["silu", "gelu_tanh"] = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    local_rope_theta: float | None = None
    rope_free_layers: tuple[int, ...] = ()
    rope_dim: int | None = None
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            kind = field.type.removesuffix(" | None") if isinstance(field.type, str) else ""
            if kind == "int" and field.name != "bos_token_id" and not 1 <= value < 2**31:
                raise ModelError(f"{field.name} must be in 1..{2**31 - 1}, got {value!r:.40}")
            if kind == "float" and not (math.isfinite(value) and value > 0):
                raise ModelError(f"{field.name} must be positive and finite, got {value!r}")
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
        for name in ("rope_theta", "local_rope_theta"):
            theta = getattr(self, name)
            if theta is not None and not 1 < theta < 1e18:
                raise ModelError(f"{name} must be over 1 and below 1e18, got {theta!r}")
        if self.activation not in ("silu", "gelu_tanh"):
            raise ModelError(f"activation must be silu or gelu_tanh, got {self.activation!r:.40}")
        for name in ("sliding_layers", "rope_free_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted(set(layers)) or not all(
                0 <= layer < self.num_hidden_layers for layer in layers
            ):
                raise ModelError(f"{name} must be layers in ascending order, got {layers!r:.80}")
        if self.sliding_layers and self.sliding_window is None:
            raise ModelError("sliding_window is missing: there are sliding_layers")
        if self.rope_dim is not None and (self.rope_dim % 2 or self.rope_dim > self.head_dim):
            raise ModelError(
                f"rope_dim must be even and at most head_dim {self.head_dim}, got {self.rope_dim}"
            )
        if self.rope_scaling is not None:
            self.rope_scaling.check_pairs((self.rope_dim or self.head_dim) // 2)

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

    @property
    def score_scale(self) -> float:
        """What scores are multiplied with."""
        return self.attention_scale or 1.0 / math.sqrt(self.head_dim)

    def window_of(self, layer: int) -> int | None:
        """How many positions a layer sees; None for all."""
        return self.sliding_window if layer in self.sliding_layers else None

    def rope_of(self, layer: int) -> Literal["", "local_"] | None:
        """Which rope tables a layer rotates by: before `cos` and `sin`; None for no rope."""
        if layer in self.rope_free_layers:
            return None
        return "local_" if self.has_local_rope and layer in self.sliding_layers else ""

    @property
    def has_local_rope(self) -> bool:
        return self.local_rope_theta is not None

    def rope_tables(self, rows: range | None = None) -> dict[str, npt.NDArray[np.float32]]:
        """Tables (max_position_embeddings, head_dim/2) by name: cos, sin, and those of sliding
        layers, if they have their own. With `rows` of these positions alone."""
        tables = {
            "": rope_tables(
                self.rope_theta,
                self.head_dim,
                self.max_position_embeddings,
                rows=rows,
                rope_dim=self.rope_dim,
                scaling=self.rope_scaling,
            )
        }
        if self.local_rope_theta is not None:
            tables["local_"] = rope_tables(
                self.local_rope_theta,
                self.head_dim,
                self.max_position_embeddings,
                rows=rows,
                rope_dim=self.rope_dim,
            )
        return {
            prefix + name: table
            for prefix, pair in tables.items()
            for name, table in zip(("cos", "sin"), pair, strict=True)
        }

    def to_dict(self) -> dict[str, Any]:
        """Without the options that have their default, so that a model has one form, and one
        digest, however many options there are."""
        values = asdict(self)
        options = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        return {k: v for k, v in values.items() if k not in options or v != options[k]}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build from `to_dict`'s output (or its JSON). Raises `ModelError` naming the key."""
        names = {field.name for field in fields(cls)}
        if unknown := sorted(set(raw) - names):
            raise ModelError(f"unknown keys in the model config: {', '.join(unknown)}")
        required = {field.name for field in fields(cls) if field.default is MISSING}
        if missing := sorted(required - set(raw)):
            raise ModelError(f"keys missing in the model config: {', '.join(missing)}")
        values = dict(raw)
        try:
            for name in ("eos_token_ids", "sliding_layers", "rope_free_layers"):
                values[name] = tuple(values.get(name, ()))
            if (scaling := values.get("rope_scaling")) is not None:
                values["rope_scaling"] = RopeScaling.from_dict(scaling)
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"a value of the model config has the wrong type: {error}") from error
