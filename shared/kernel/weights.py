"""What a kernel is given: the weights of a layer group and the slices of a batch. Computes nothing.

Sizes are checked where they are read (shared.model.layer_group) and again inside the C kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.kernel.matrix import Float32, PackedMatrix


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Sizes that every layer of a group shares."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    half_pairing: bool
    norm_eps: float
    num_positions: int  # rows of the rope tables
    score_scale: float  # a binary32
    score_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    gelu_tanh: bool = False  # else silu


@dataclass(frozen=True, slots=True)
class RopeTables:
    """cos and sin of every position and pair, (num_positions, head_dim/2) each."""

    cos: Float32
    sin: Float32


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; norms are (D,), those of heads (hd,).

    `rope` is None in a layer that does not rotate. With a `window` a row sees so many positions,
    its own among them; with 0, all before it. Of biases, head norms and norms of what is added a
    layer has all or none.
    """

    input_norm: Float32
    q: PackedMatrix
    k: PackedMatrix
    v: PackedMatrix
    o: PackedMatrix
    post_norm: Float32
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    rope: RopeTables | None
    window: int = 0
    q_bias: Float32 | None = None  # (H * hd,)
    k_bias: Float32 | None = None  # (K * hd,)
    v_bias: Float32 | None = None
    q_norm: Float32 | None = None
    k_norm: Float32 | None = None
    attention_out_norm: Float32 | None = None
    mlp_out_norm: Float32 | None = None


@dataclass(frozen=True, slots=True)
class GroupWeights:
    """A layer group. The first group of a model has an embedding, the last a norm and a head."""

    shape: GroupShape
    layers: tuple[LayerWeights, ...]
    embedding: PackedMatrix | None = None
    final_norm: Float32 | None = None
    head: PackedMatrix | None = None


@dataclass(frozen=True, slots=True)
class PagedSlice:
    """num_rows consecutive positions of one sequence, and the KV pages that hold it.

    A page is uint16 (fp16 bits) of (layers, kv heads, 2, 16, head_dim); `addresses` holds where
    each page's first byte lies, uintp (pages,).
    """

    pages: Sequence[npt.NDArray[np.uint16]]
    addresses: npt.NDArray[np.uintp]
    start_position: int
    num_rows: int


@dataclass(frozen=True, slots=True)
class Logits:
    """Finite logits (n, V), and of each row the lowest id of its largest."""

    values: Float32
    largest: Sequence[int]


class BoundGroup(Protocol):
    """A layer group made ready by a backend. Not thread-safe: scratch memory is kept."""

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        """(T,) -> (T, D)."""

    def forward(self, hidden: Float32, slices: Sequence[PagedSlice]) -> None:
        """Run the layers over hidden (R, D) in place, and write the new KV rows.

        Raises `KernelError` when a value is not finite; hidden and the new KV rows are then of no
        use.
        """

    def head(self, hidden_rows: Float32) -> Logits:
        """(n, D) -> (n, V). Raises `KernelError` when a value is not finite."""


class KernelBackend(Protocol):
    """One implementation of docs/arithmetic.md."""

    @property
    def name(self) -> str: ...

    def bind(self, weights: GroupWeights) -> BoundGroup:
        """Make a layer group ready; keeps references to the weights, copies none."""
