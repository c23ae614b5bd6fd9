"""Which tensors of a model file are quantised, what types they may get, and how each is made.

R rows, C cols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from shared.errors import ConfigError, ModelError
from shared.formats.description import (
    EMBEDDING_TENSOR,
    HEAD_TENSOR,
    ModelDescription,
    is_vector,
    layer_tensor,
)
from shared.formats.gguf_file import GgufFile
from shared.formats.reading import read_float32
from shared.formats.stored_tensor import StoredTensor
from shared.kernel.matrix import Float32
from shared.quant.blocks import Int4Blocks, Int8Blocks
from shared.quant.feedback import (
    conditional_factor,
    round_int8_with_feedback,
    round_with_feedback,
)
from shared.quant.nearest import quantize_int4_affine, quantize_int4_symmetric, quantize_int8
from shared.quant.search import fit_affine, fit_symmetric, search_affine, search_symmetric

Float64 = npt.NDArray[np.float64]
Blocks = Int4Blocks | Int8Blocks

PART_ROWS = 256  # of a matrix are one thread's work
SLICE_WEIGHTS = 1 << 24  # of a tensor are worked on at a time: 64 MiB in binary32


class Method(StrEnum):
    """How scale and min of a group are found; `docs/quality.md` compares them."""

    SYMMETRIC = "symmetric"
    RANGE = "range"
    SEARCH = "search"


# The types that a tensor may get, by bits and method; the first is what it gets without a budget.
TYPES: dict[tuple[int, Method], tuple[str, ...]] = {
    (4, Method.SYMMETRIC): ("Q4_0", "Q8_0"),
    (4, Method.RANGE): ("Q4_1", "Q8_0"),
    (4, Method.SEARCH): ("Q4_1", "Q4_0", "Q8_0"),
    (8, Method.SYMMETRIC): ("Q8_0",),
    (8, Method.SEARCH): ("Q8_0",),
}


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a file. `key` is ours, of the first of ours that lie in it, or "": an embedding
    that is only looked up. `unit` is the name of those that get one type together."""

    name: str
    key: str
    unit: str
    stored: StoredTensor

    @property
    def num_weights(self) -> int:
        return self.stored.num_rows * self.stored.num_cols


def types_of(bits: int, method: Method) -> tuple[str, ...]:
    """Raises `ConfigError` for a pair that there is not."""
    if (bits, method) not in TYPES:
        raise ConfigError(
            f"--method {method} is for --bits 4, got {bits}"
            if bits == 8
            else f"--bits must be 4 or 8, got {bits}",
            remedy="8 bits are symmetric: their error is 1/300 of that of 4 bits"
            if bits == 8
            else "",
        )
    return TYPES[bits, method]


def matrices_of(description: ModelDescription, file: GgufFile) -> list[Matrix]:
    """All matrices of a model, layer by layer, then embedding and head."""
    config = description.config
    last = config.num_hidden_layers - 1
    found: dict[str, Matrix] = {}

    def add(key: str, unit: str, *, is_looked_up: bool = False) -> None:
        name = description.tensors[key].source_name
        if name not in found:  # several of ours may lie in one of the file
            found[name] = Matrix(name, "" if is_looked_up else key, unit, file.tensors[name])

    for key in description.tensors:
        _, _, rest = key.partition("layer.")
        index, _, name = rest.partition(".")
        if rest and not is_vector(name):
            unit = {0: "first layer", last: "last layer"}.get(int(index), f"{name}, other layers")
            add(layer_tensor(int(index), name), unit)
    if config.tie_word_embeddings:
        add(EMBEDDING_TENSOR, "embedding and head")
    else:
        add(EMBEDDING_TENSOR, "embedding", is_looked_up=True)
        add(HEAD_TENSOR, "head")
    return list(found.values())


def row_slices(stored: StoredTensor) -> Iterator[slice]:
    """Rows that are worked on together."""
    step = max(1, SLICE_WEIGHTS // stored.num_cols)
    for start in range(0, stored.num_rows, step):
        yield slice(start, min(start + step, stored.num_rows))


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Makes blocks of a type by a method."""

    method: Method
    num_threads: int = 1

    def quantize(self, weights: Float32, type_name: str, factor: Float64 | None = None) -> Blocks:
        """float32 (R, C) in a type; `factor` is that of the inputs' moments, for the search.

        Raises `ModelError` for weights that the type cannot hold.
        """
        if type_name == "Q8_0":
            if self.method is Method.SEARCH and factor is not None:
                return self._in_parts(weights, lambda w: round_int8_with_feedback(w, factor))
            return quantize_int8(weights)  # the largest weight sets the scale: no other is better
        if self.method is Method.SYMMETRIC:
            return quantize_int4_symmetric(weights)
        if self.method is Method.RANGE:
            return quantize_int4_affine(weights)
        is_affine = type_name == "Q4_1"
        if factor is None:
            search = search_affine if is_affine else search_symmetric
            return search(weights, num_threads=self.num_threads)
        fit = fit_affine if is_affine else fit_symmetric
        return self._in_parts(weights, lambda rows: round_with_feedback(rows, factor, fit))

    def _in_parts(self, weights: Float32, make: Callable[[Float32], Blocks]) -> Blocks:
        # Parts of one size on any number of threads: BLAS sums in another order for another size.
        parts = [weights[at : at + PART_ROWS] for at in range(0, len(weights), PART_ROWS)]
        with ThreadPoolExecutor(self.num_threads) as pool:
            return join(list(pool.map(make, parts)))


def join(parts: Sequence[Blocks]) -> Blocks:
    """Rows one below the other, all of one kind."""
    int4 = [part for part in parts if isinstance(part, Int4Blocks)]
    if int4:
        return Int4Blocks(
            np.concatenate([part.scale for part in int4]),
            np.concatenate([part.min for part in int4]),
            np.concatenate([part.nibbles for part in int4]),
        )
    int8 = [part for part in parts if isinstance(part, Int8Blocks)]
    return Int8Blocks(
        np.concatenate([part.scale for part in int8]), np.concatenate([part.q for part in int8])
    )


def quantize_stored(
    matrix: Matrix, type_name: str, quantizer: Quantizer, moments: Float64 | None
) -> tuple[Blocks, float, float]:
    """A whole tensor, by slices of rows: its blocks, the squared error, and the squared weights."""
    made: list[Blocks] = []
    error = power = 0.0
    factor = None
    if moments is not None and quantizer.method is Method.SEARCH:
        factor = conditional_factor(moments)
    for rows in row_slices(matrix.stored):
        weights = read_float32(matrix.stored, rows.start, rows.stop)
        try:
            blocks = quantizer.quantize(weights, type_name, factor)
        except ModelError as found:  # which names the row of the slice
            raise ModelError(
                f"tensor {matrix.name}, rows from {rows.start}: {found}", remedy=found.remedy
            ) from found
        made.append(blocks)
        error += float(np.square(blocks.dequantized() - weights).sum(dtype=np.float64))
        power += float(np.square(weights).sum(dtype=np.float64))
    return join(made), error, power
