"""Collects what a text's inputs of matrices are like: their second moments. Knows no quantisation.

C inputs (cols) of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from services.quality.stages import FloatStages
from services.quality.windows import Windows
from shared.errors import ModelError
from shared.formats.description import (
    EMBEDDING_TENSOR,
    HEAD_TENSOR,
    ModelDescription,
    layer_tensor,
)
from shared.kernel.matrix import Float32

Float64 = npt.NDArray[np.float64]

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Whose inputs a matrix shares.
_SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


class Moments:
    """X'X / n of the inputs X (n, C) that matrices have met since the last `clear`."""

    def __init__(self) -> None:
        self._sums: dict[str, Float64] = {}
        self._counts: dict[str, int] = {}

    def observe(self, name: str, rows: Float32) -> None:
        """Take rows (T, C) that the matrix of that name meets."""
        product = rows.T @ rows
        if not np.isfinite(product).all():
            raise ModelError(f"the inputs of {name} are not finite on the calibration text")
        if name in self._sums:
            self._sums[name] += product
            self._counts[name] += len(rows)
        else:
            self._sums[name] = product.astype(np.float64)
            self._counts[name] = len(rows)

    def of(self, name: str) -> Float64 | None:
        """(C, C) of the inputs of a matrix, or of the one it shares them with; None if unseen."""
        site = _site(name)
        if site not in self._sums:
            return None
        return self._sums[site] / self._counts[site]

    def clear(self) -> None:
        self._sums.clear()
        self._counts.clear()


class MeanSquares:
    """The diagonals of `Moments` alone, small enough to keep for all layers."""

    def __init__(self) -> None:
        self._sums: dict[str, Float64] = {}
        self._counts: dict[str, int] = {}

    def observe(self, name: str, rows: Float32) -> None:
        """Take rows (T, C) that the matrix of that name meets."""
        squares = np.einsum("tc,tc->c", rows, rows, dtype=np.float64)
        self._sums[name] = self._sums.get(name, 0.0) + squares
        self._counts[name] = self._counts.get(name, 0) + len(rows)

    def of(self, name: str) -> Float64 | None:
        """(C,) of the inputs of a matrix; None if unseen."""
        site = _site(name)
        if site not in self._sums:
            return None
        return self._sums[site] / self._counts[site]


def _site(name: str) -> str:
    """The matrix whose inputs are observed for those of `name`."""
    stem, _, last = name.rpartition(".")
    return f"{stem}.{_SHARED[last]}" if last in _SHARED else name


def walk_layers(
    description: ModelDescription, windows: Windows
) -> Iterator[tuple[list[str], Moments]]:
    """Run a text through a model in binary32; for each layer, then for the head, the keys of the
    matrices whose inputs `moments` now holds. One layer is in memory.
    """
    moments = Moments()
    config = description.config
    model = FloatStages(config, description.tensors, observe=moments.observe)
    hidden = [model.embed(ids) for ids in windows.inputs]  # N of (T, D)
    for index in range(config.num_hidden_layers):
        stage = model.layer(index)
        hidden = [stage(rows) for rows in hidden]
        yield [layer_tensor(index, name) for name in MATRICES], moments
        moments.clear()
    for rows in hidden:
        model.head_input(rows)
    head = EMBEDDING_TENSOR if config.tie_word_embeddings else HEAD_TENSOR
    yield [head], moments
