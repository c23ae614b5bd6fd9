"""The forward pass of a dense decoder with unquantised binary32 weights, in the order of the paper.

What a model would say if its weights and activations were not quantised: what quantised models are
measured against, and the bridge to other implementations. Its bits depend on NumPy's BLAS, so it
serves nobody tokens. Knows no file format, page or chunk: weights come by their name.

T new tokens, S cached + new, D hidden_size, H heads, K kv heads, hd head_dim, V vocab_size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel.matrix import Float32
from shared.model.config import ModelConfig

ReadWeights = Callable[[str], Float32]
Observe = Callable[[str, Float32], None]
"""Called with the name of a matrix and the rows (T, cols) that it is about to meet."""


def _observe_nothing(name: str, rows: Float32) -> None:
    pass


class FloatCache:
    """Keys and values (S, K, hd) of one sequence, layer by layer."""

    def __init__(self, num_layers: int) -> None:
        self.num_positions = 0
        self._rows: list[tuple[Float32, Float32] | None] = [None] * num_layers

    def append(self, layer: int, k: Float32, v: Float32) -> tuple[Float32, Float32]:
        """Add rows (T, K, hd) behind those of positions 0..num_positions-1, and return all."""
        held = self._rows[layer]
        if held is not None:
            k = np.concatenate([held[0][: self.num_positions], k])
            v = np.concatenate([held[1][: self.num_positions], v])
        self._rows[layer] = (k, v)
        return k, v

    def advance(self, num_tokens: int) -> None:
        """Declare the rows of so many more positions valid, in all layers."""
        self.num_positions += num_tokens


class FloatModel:
    """A model of `config` whose tensor of a name `read` returns, float32 (rows, cols).

    Names and shapes are those of `shared.formats.description.tensor_shapes`. With `keep_weights`
    each tensor is read once; without, whenever a layer runs, so that one layer is in memory.
    `observe` sees the inputs of matrices; of those that share one (q, k and v; gate and up), the
    first tells.
    """

    def __init__(
        self,
        config: ModelConfig,
        read: ReadWeights,
        *,
        keep_weights: bool = True,
        observe: Observe = _observe_nothing,
    ) -> None:
        self.config = config
        self._read = read
        self._kept: dict[str, Float32] | None = {} if keep_weights else None
        self._observe = observe
        self._tables: dict[str, Float32] = {}  # rope, of the rows below
        self._table_rows = range(0)

    def new_cache(self) -> FloatCache:
        return FloatCache(self.config.num_hidden_layers)

    def logits(self, token_ids: npt.NDArray[np.integer], cache: FloatCache) -> Float32:
        """Token ids (T,) behind those of the cache -> (T, V); the cache grows by T positions.

        Raises `KernelError` for ids outside the vocabulary, and positions behind the model's last.
        """
        x = self.embed(token_ids)
        end = cache.num_positions + len(token_ids)
        if end > self.config.max_position_embeddings:
            raise KernelError(
                f"position {end} is not within the model's {self.config.max_position_embeddings}"
            )
        for index in range(self.config.num_hidden_layers):
            x = self.layer(index, x, cache)
        cache.advance(len(token_ids))
        return self.head(x)

    def embed(self, token_ids: npt.NDArray[np.integer]) -> Float32:
        """(T,) -> (T, D)."""
        if ((token_ids < 0) | (token_ids >= self.config.vocab_size)).any():
            raise KernelError("a token id lies outside the vocabulary")
        rows: Float32 = self._weights("embed_tokens")[token_ids]
        return rows * np.float32(self.config.embedding_scale)

    def layer(self, index: int, x: Float32, cache: FloatCache) -> Float32:
        """Layer `index` over x (T, D), the positions from cache.num_positions on. The caller
        advances the cache when all layers have run."""
        weights = {name: self._weights(f"layer.{index}.{name}") for name in self._names}
        attended = self._attention(index, weights, self._norm(x, weights["input_layernorm"]), cache)
        if self.config.post_norms:
            attended = self._norm(attended, weights["attention_out_norm"])
        x = x + attended
        fed = self._mlp(index, weights, self._norm(x, weights["post_attention_layernorm"]))
        if self.config.post_norms:
            fed = self._norm(fed, weights["mlp_out_norm"])
        return x + fed

    def head(self, x: Float32) -> Float32:
        """(T, D) of the last layer -> logits (T, V)."""
        out: Float32 = self.head_input(x) @ self._weights(self._head_name).T
        return _softcap(out, self.config.logit_softcap)

    def head_input(self, x: Float32) -> Float32:
        """(T, D) of the last layer -> (T, D), what the head's matrix meets."""
        y = self._norm(x, self._weights("norm"))
        self._observe(self._head_name, y)
        return y

    @property
    def _head_name(self) -> str:
        return "embed_tokens" if self.config.tie_word_embeddings else "lm_head"

    @property
    def _names(self) -> tuple[str, ...]:
        config = self.config
        return (
            *("input_layernorm", "q_proj", "k_proj", "v_proj", "o_proj"),
            *("post_attention_layernorm", "gate_proj", "up_proj", "down_proj"),
            *(("q_bias", "k_bias", "v_bias") if config.qkv_bias else ()),
            *(("q_norm", "k_norm") if config.qk_norm else ()),
            *(("attention_out_norm", "mlp_out_norm") if config.post_norms else ()),
        )

    def _weights(self, name: str) -> Float32:
        if self._kept is None:
            return self._read(name)
        if name not in self._kept:
            self._kept[name] = self._read(name)
        return self._kept[name]

    def _norm(self, x: Float32, weight: Float32) -> Float32:
        mean_square = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        out: Float32 = x / np.sqrt(mean_square + np.float32(self.config.rms_norm_eps)) * weight[0]
        return out

    def _attention(
        self, index: int, weights: dict[str, Float32], y: Float32, cache: FloatCache
    ) -> Float32:
        config, num_rows = self.config, len(y)
        self._observe(f"layer.{index}.q_proj", y)
        q, k, v = (y @ weights[f"{name}_proj"].T for name in "qkv")
        if config.qkv_bias:
            q, k, v = q + weights["q_bias"], k + weights["k_bias"], v + weights["v_bias"]
        q = q.reshape(num_rows, config.num_attention_heads, config.head_dim)  # (T, H, hd)
        k = k.reshape(num_rows, config.num_key_value_heads, config.head_dim)  # (T, K, hd)
        v = v.reshape(k.shape)
        if config.qk_norm:
            q, k = self._norm(q, weights["q_norm"]), self._norm(k, weights["k_norm"])
        start = cache.num_positions
        q, k = self._rotate(index, q, start), self._rotate(index, k, start)
        keys, values = cache.append(index, k, v)  # (S, K, hd)
        repeat = config.num_attention_heads // config.num_key_value_heads
        q = q.reshape(num_rows, -1, repeat, config.head_dim).transpose(
            1, 2, 0, 3
        )  # (K, H/K, T, hd)
        scores = q @ keys.transpose(1, 2, 0)[:, None]  # (K, H/K, T, S)
        scores = _softcap(scores * np.float32(config.score_scale), config.attention_softcap)
        own = start + np.arange(num_rows)[:, None]
        other = np.arange(len(keys))[None]
        seen = other <= own
        if (window := config.window_of(index)) is not None:
            seen &= other > own - window
        scores = np.where(seen, scores, np.float32(-np.inf))
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        out = p @ values.transpose(1, 0, 2)[:, None]  # (K, H/K, T, hd)
        flat: Float32 = out.transpose(2, 0, 1, 3).reshape(num_rows, -1)
        self._observe(f"layer.{index}.o_proj", flat)
        return flat @ weights["o_proj"].T

    def _rotate(self, index: int, x: Float32, start: int) -> Float32:
        prefix = self.config.rope_of(index)
        if prefix is None:
            return x
        rows = range(start, start + len(x))
        if rows != self._table_rows:  # those of every position would be most of a small model
            self._tables, self._table_rows = self.config.rope_tables(rows), rows
        cos, sin = self._tables[f"{prefix}cos"][:, None], self._tables[f"{prefix}sin"][:, None]
        half = self.config.head_dim // 2
        is_half = self.config.rope_pairing == "half"
        first = slice(0, half) if is_half else slice(0, None, 2)
        second = slice(half, None) if is_half else slice(1, None, 2)
        a, b = x[..., first], x[..., second]
        out = np.empty_like(x)
        out[..., first] = a * cos - b * sin
        out[..., second] = a * sin + b * cos
        return out

    def _mlp(self, index: int, weights: dict[str, Float32], y: Float32) -> Float32:
        self._observe(f"layer.{index}.gate_proj", y)
        gate, up = y @ weights["gate_proj"].T, y @ weights["up_proj"].T
        if self.config.activation == "gelu_tanh":
            inner = math.sqrt(2 / math.pi) * (gate + np.float32(0.044715) * gate**3)
            gate = np.float32(0.5) * gate * (1 + np.tanh(inner))
        else:
            with np.errstate(over="ignore"):  # e^-x of a large negative x: the quotient is 0
                gate = gate / (1 + np.exp(-gate))
        inner_rows = (gate * up).astype(np.float32, copy=False)
        self._observe(f"layer.{index}.down_proj", inner_rows)
        out: Float32 = inner_rows @ weights["down_proj"].T
        return out


def _softcap(x: Float32, cap: float | None) -> Float32:
    if cap is None:
        return x
    out: Float32 = np.float32(cap) * np.tanh(x / np.float32(cap))
    return out
