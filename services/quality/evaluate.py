"""Runs a text through a model, and beside it through a reference, and says how far they are apart.

T positions of a window, N windows, D hidden_size, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.quality.scores import Comparison, Divergence, Perplexity, Scores, log_softmax
from services.quality.stages import Stage, StagedModel
from services.quality.windows import Windows
from shared.errors import ConfigError, ModelError
from shared.kernel.matrix import Float32

HEAD_ROWS = 64  # logits of so many positions are in memory: 130 MB in binary64 at 256,000 tokens

Progress = Callable[[int, int], None]
"""Called with the steps done and in all; a step is a window through a layer or a head."""


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far hidden states are from the reference's after a layer.

    `relative_rms` is the RMS of the difference over the RMS of the reference's, all positions of
    all windows.
    """

    layer: int
    relative_rms: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` found. The last three are those of a reference, if there was one."""

    perplexity: Perplexity
    num_windows: int
    window: int
    num_tokens: int
    reference_perplexity: Perplexity | None = None
    divergence: Divergence | None = None
    layers: tuple[LayerError, ...] = ()


def evaluate(
    model: StagedModel,
    windows: Windows,
    *,
    reference: StagedModel | None = None,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Score a text's windows. In memory are the hidden states of all windows, and one layer.

    Raises `ConfigError` when the models cannot be compared: other vocabularies, layers or widths,
    or a window longer than a model's context, `ModelError` for numbers that are not finite.
    """
    models = [model] if reference is None else [model, reference]
    _check(models, windows)
    num_layers = model.config.num_hidden_layers
    steps = _Steps(progress, len(models) * len(windows.inputs) * (num_layers + 1))
    hidden = [[m.embed(ids) for ids in windows.inputs] for m in models]  # of each: N of (T, D)
    errors: list[LayerError] = []
    for index in range(num_layers):
        for m, states in zip(models, hidden, strict=True):
            stage = m.layer(index)
            for number in range(len(states)):
                states[number] = _finite(stage, states[number], f"layer {index}")
                steps.done()
        if reference is not None:
            errors.append(LayerError(index, _relative_rms(*hidden)))
    scores, comparison = [Scores() for _ in models], Comparison()
    scored = slice(windows.first_scored, windows.inputs.shape[1] - 1)
    for number, targets in enumerate(windows.targets):
        rows = [states[number][scored] for states in hidden]
        for start in range(0, len(targets), HEAD_ROWS):
            part = slice(start, start + HEAD_ROWS)
            logs = [
                log_softmax(_finite(m.logits, r[part], "the head"))
                for m, r in zip(models, rows, strict=True)
            ]
            for score, log_probabilities in zip(scores, logs, strict=True):
                score.add(log_probabilities, targets[part])
            if reference is not None:
                comparison.add(*logs)
        steps.done(len(models))
    perplexities = [score.perplexity() for score in scores]
    return Evaluation(
        perplexity=perplexities[0],
        num_windows=len(windows.inputs),
        window=windows.inputs.shape[1],
        num_tokens=windows.num_tokens,
        reference_perplexity=perplexities[1] if reference is not None else None,
        divergence=comparison.divergence(*perplexities) if reference is not None else None,
        layers=tuple(errors),
    )


def _finite(stage: Stage, hidden: Float32, name: str) -> Float32:
    """What a stage gives. Raises `ModelError` for numbers that would make figures of nothing."""
    with np.errstate(over="ignore", invalid="ignore"):  # told of below, by name
        out = stage(hidden)
    if not np.isfinite(out).all():
        raise ModelError(
            f"{name} gives numbers that are not finite", remedy="the model's weights are damaged"
        )
    return out


class _Steps:
    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        progress(0, total)

    def done(self, number: int = 1) -> None:
        self._done += number
        self._progress(self._done, self._total)


def _relative_rms(ours: list[Float32], reference: list[Float32]) -> float:
    difference = power = 0.0
    for a, b in zip(ours, reference, strict=True):
        difference += float(np.square(a - b, dtype=np.float64).sum())
        power += float(np.square(b, dtype=np.float64).sum())
    return float(np.sqrt(difference / power)) if power else 0.0


def _check(models: list[StagedModel], windows: Windows) -> None:
    for model in models:
        check_window(windows, model.config.max_position_embeddings)
    for name in ("vocab_size", "num_hidden_layers", "hidden_size"):
        first, *others = (getattr(model.config, name) for model in models)
        if any(other != first for other in others):
            raise ConfigError(
                f"--reference is another model: its {name} is {others[0]}, not {first}",
                remedy="give another quantisation of the same model, or its unquantised folder",
            )


def check_window(windows: Windows, max_positions: int) -> None:
    """Raise `ConfigError` for windows that are longer than a model's context."""
    window = windows.inputs.shape[1]
    if window > max_positions:
        raise ConfigError(
            f"--window {window} is longer than the model's context of {max_positions} positions"
        )
