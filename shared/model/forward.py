"""The forward pass of a dense decoder, in the order of the paper, on the NumPy reference.

The definition that the C kernel is held against, and the way to compute without a C compiler.
R rows of the batch, D hidden_size, H heads, K kv heads, hd head_dim, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel.matrix import Float32
from shared.kernel.reference import (
    embed,
    gelu_tanh,
    matmul,
    quantize_activations,
    require_finite,
    rms_norm,
    rope,
    silu,
    softcap,
)
from shared.kernel.reference_attention import attention, store_kv
from shared.kernel.weights import GroupWeights, LayerWeights, Logits, PagedSlice


class ReferenceBackend:
    """The NumPy reference."""

    name = "reference"

    def bind(self, weights: GroupWeights) -> ReferenceGroup:
        return ReferenceGroup(weights)


class ReferenceGroup:
    """A layer group on the reference. Unpacks each matrix at its first use and keeps it."""

    def __init__(self, weights: GroupWeights) -> None:
        self._weights = weights

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        matrix = self._weights.embedding
        assert matrix is not None, "this group has no embedding"
        outside = (token_ids < 0) | (token_ids >= matrix.rows)
        if outside.any():
            row = int(np.argmax(outside))
            raise KernelError(f"batch row {row}: a token id lies outside the vocabulary")
        return embed(matrix, token_ids) * np.float32(self._weights.shape.embedding_scale)

    def forward(self, hidden: Float32, slices: Sequence[PagedSlice]) -> None:
        x = hidden
        for index, layer in enumerate(self._weights.layers):
            try:
                x = self._layer(index, layer, x, slices)
            except KernelError as error:
                raise KernelError(f"layer {index} of the group: {error}") from error
        hidden[:] = x

    def head(self, hidden_rows: Float32) -> Logits:
        weights = self._weights
        assert weights.head is not None, "this group has no head"
        assert weights.final_norm is not None
        x = quantize_activations(self._norm(hidden_rows, weights.final_norm), terms=2)
        out = matmul(weights.head, x)
        require_finite(out)
        out = softcap(out, weights.shape.logit_softcap)
        return Logits(out, np.argmax(out, axis=1).tolist())

    def _layer(
        self, index: int, layer: LayerWeights, x: Float32, slices: Sequence[PagedSlice]
    ) -> Float32:
        with np.errstate(over="ignore", invalid="ignore"):  # require_finite looks at every result
            attended = self._attention(index, layer, self._norm(x, layer.input_norm), slices)
            x = x + self._norm_if(attended, layer.attention_out_norm)
            fed = self._mlp(layer, self._norm(x, layer.post_norm))
            x = x + self._norm_if(fed, layer.mlp_out_norm)
        require_finite(x)
        return x

    def _norm(self, x: Float32, weight: Float32) -> Float32:
        return rms_norm(x, weight, self._weights.shape.norm_eps)

    def _norm_if(self, x: Float32, weight: Float32 | None) -> Float32:
        return x if weight is None else self._norm(x, weight)

    def _attention(
        self, index: int, layer: LayerWeights, y: Float32, slices: Sequence[PagedSlice]
    ) -> Float32:
        shape = self._weights.shape
        x = quantize_activations(y, terms=2)
        q, k, v = matmul(layer.q, x), matmul(layer.k, x), matmul(layer.v, x)
        if layer.q_bias is not None and layer.k_bias is not None and layer.v_bias is not None:
            q, k, v = q + layer.q_bias, k + layer.k_bias, v + layer.v_bias
        for values in (q, k, v):
            require_finite(values)
        q = q.reshape(-1, shape.num_heads, shape.head_dim)  # (R, H, hd)
        k = k.reshape(-1, shape.num_kv_heads, shape.head_dim)  # (R, K, hd)
        v = v.reshape(k.shape)
        q, k = self._norm_if(q, layer.q_norm), self._norm_if(k, layer.k_norm)
        if layer.rope is not None:
            positions = np.concatenate([s.start_position + np.arange(s.num_rows) for s in slices])
            cos, sin = layer.rope.cos[positions], layer.rope.sin[positions]
            q = rope(q, cos, sin, half_pairing=shape.half_pairing)
            k = rope(k, cos, sin, half_pairing=shape.half_pairing)
        require_finite(k)
        out = np.empty_like(q)
        first = 0
        for part in slices:
            rows = slice(first, first + part.num_rows)
            store_kv(part.pages, index, part.start_position, k[rows], v[rows])
            out[rows] = attention(
                q[rows],
                part.pages,
                index,
                part.start_position,
                shape.score_scale,
                window=layer.window,
                score_softcap=shape.score_softcap,
            )
            first += part.num_rows
        return matmul(layer.o, quantize_activations(out.reshape(len(y), -1)))

    def _mlp(self, layer: LayerWeights, y: Float32) -> Float32:
        x = quantize_activations(y)
        gate, up = matmul(layer.gate, x), matmul(layer.up, x)
        require_finite(gate)
        activated = gelu_tanh(gate) if self._weights.shape.gelu_tanh else silu(gate)
        return matmul(layer.down, quantize_activations(activated * up, terms=2))
