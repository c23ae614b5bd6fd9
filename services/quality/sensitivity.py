"""Measures what each unit of tensors loses in each type it may get, on a text.

One unit at a time is rounded, plainly and to 4 bits, and the divergence of the model with it from
the model without is measured. A type's loss is that, by how much larger or smaller the error of
its weights is: a divergence is proportional to the squares of small errors. The errors are those
of some rows of each tensor, weighted by the mean squares of the inputs.

T positions of a window, N windows, D hidden_size, R rows, C cols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from services.quality.budget import Option, Unit
from services.quality.moments import MeanSquares
from services.quality.scores import Comparison, log_softmax
from services.quality.stages import FloatStages
from services.quality.tensors import Matrix, Quantizer
from services.quality.windows import Windows
from shared.formats.description import ModelDescription, TensorView
from shared.formats.gguf_copy import type_bytes
from shared.formats.reading import read_float32
from shared.kernel.matrix import Float32
from shared.quant.nearest import quantize_int4_affine

SAMPLE_ROWS = 64
HEAD_ROWS = 64
MIN_LOSS = 1e-12  # nats; a unit that loses nothing keeps an order of its types all the same

Progress = Callable[[int, int], None]


def measure_units(
    description: ModelDescription,
    matrices: Sequence[Matrix],
    windows: Windows,
    types: Sequence[str],
    quantizer: Quantizer,
    *,
    progress: Progress = lambda done, total: None,
) -> list[Unit]:
    """The units of a model, with the bytes and the loss of each of `types`.

    Computes the model once for each unit and once for the truth, a layer at a time.
    """
    names = list(dict.fromkeys(matrix.unit for matrix in matrices))
    powers = MeanSquares()
    losses = _probe_losses(description, matrices, windows, names, powers, progress)
    units = []
    for name in names:
        own = [matrix for matrix in matrices if matrix.unit == name]
        num_weights = sum(matrix.num_weights for matrix in own)
        probe = sum(_error(matrix, _probe, powers) for matrix in own)
        options = []
        for type_name in types:

            def rounded(rows: Float32, type_name: str = type_name) -> Float32:
                return quantizer.quantize(rows, type_name).dequantized()

            error = sum(_error(matrix, rounded, powers) for matrix in own)
            loss = max(losses[name], MIN_LOSS) * (error / probe if probe else 0.0)
            options.append(Option(type_name, type_bytes(type_name, num_weights), loss))
        units.append(Unit(name, num_weights, tuple(options)))
    return units


def _probe_losses(
    description: ModelDescription,
    matrices: Sequence[Matrix],
    windows: Windows,
    names: Sequence[str],
    powers: MeanSquares,
    progress: Progress,
) -> dict[str, float]:
    """Mean KL of the model with each unit rounded; `powers` sees the inputs of the model as it is.

    A variant's hidden states are the model's own up to the first layer that it changes.
    """
    config = description.config
    model = FloatStages(config, description.tensors, observe=powers.observe)
    variants = {name: _variant(description, matrices, name) for name in names}
    first = {
        name: min(_layer_of(m, config.num_hidden_layers) for m in matrices if m.unit == name)
        for name in names
    }
    hidden = [model.embed(ids) for ids in windows.inputs]
    changed = {
        name: [variant.embed(ids) for ids in windows.inputs]
        for name, variant in variants.items()
        if first[name] < 0
    }
    total = config.num_hidden_layers + 1
    progress(0, total)
    for index in range(config.num_hidden_layers):
        for name, variant in variants.items():
            if first[name] <= index:
                stage = variant.layer(index)
                changed[name] = [stage(rows) for rows in changed.get(name, hidden)]
        stage = model.layer(index)
        hidden = [stage(rows) for rows in hidden]
        progress(index + 1, total)
    comparisons = {name: Comparison() for name in names}
    scored = slice(windows.first_scored, windows.inputs.shape[1] - 1)
    for number in range(len(windows.inputs)):
        rows = hidden[number][scored]
        for start in range(0, len(rows), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            truth = log_softmax(model.logits(rows[part]))
            for name, variant in variants.items():
                own = changed.get(name, hidden)[number][scored]
                comparisons[name].add(log_softmax(variant.logits(own[part])), truth)
    progress(total, total)
    return {name: comparison.mean_kl() for name, comparison in comparisons.items()}


def _variant(description: ModelDescription, matrices: Sequence[Matrix], unit: str) -> FloatStages:
    """The model with one unit rounded plainly."""
    sources = {matrix.name for matrix in matrices if matrix.unit == unit}

    def rounded(view: TensorView) -> TensorView:
        if view.source_name not in sources:
            return view
        return replace(
            view, read_float32=lambda start, stop: _probe(view.read_float32(start, stop))
        )

    views: Mapping[str, TensorView] = {
        key: rounded(view) for key, view in description.tensors.items()
    }
    return FloatStages(description.config, views)


def _probe(weights: Float32) -> Float32:
    return quantize_int4_affine(weights).dequantized()


def _error(matrix: Matrix, rounded: Callable[[Float32], Float32], powers: MeanSquares) -> float:
    """The weighted squared error of a matrix, from some of its rows."""
    stored = matrix.stored
    num_rows = min(SAMPLE_ROWS, stored.num_rows)
    # Rows from all over: heads differ. The same ones every time.
    at = np.linspace(0, stored.num_rows - 1, num_rows).astype(int)
    weights = np.concatenate([read_float32(stored, int(row), int(row) + 1) for row in at])
    squares = np.square(rounded(weights) - weights, dtype=np.float64)
    seen = powers.of(matrix.key) if matrix.key else None
    if seen is not None:
        squares *= seen
    return float(squares.sum()) * stored.num_rows / num_rows


def _layer_of(matrix: Matrix, num_layers: int) -> int:
    """The layer that a matrix lies in: -1 for an embedding, `num_layers` for a head."""
    if matrix.unit in ("embedding", "embedding and head"):
        return -1
    if matrix.unit == "head":
        return num_layers
    return int(matrix.key.split(".")[1])
