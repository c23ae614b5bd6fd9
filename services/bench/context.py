"""What a token costs by the context it stands in: the pipeline beside nothing but the kernel.

At each context both run in turns, over the same positions: its last ones. What the kernel takes
more at a longer context is attention; what the pipeline takes beyond the kernel should not grow.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.bench.alone import KernelAlone
from shared.errors import ConfigError
from shared.model.config import ModelConfig
from shared.model.layer_group import LayerGroup

BAR_WIDTH = 40

Decode = Callable[[Sequence[int], int], float]
"""Seconds a token of an answer of so many tokens to a prompt."""


@dataclass(frozen=True, slots=True)
class ContextFigures:
    """Milliseconds a token whose position is at most `context`.

    `beside_ms` is the median of the turns' differences: what is not the kernel's.
    """

    context: int
    pipeline_ms: float
    kernel_ms: float
    beside_ms: float


def check_contexts(contexts: Sequence[int], num_tokens: int, config: ModelConfig) -> None:
    """Raise `ConfigError` for a context that the model does not hold, or that is too short."""
    most = config.max_position_embeddings
    if wrong := [c for c in contexts if not num_tokens < c <= most]:
        raise ConfigError(
            f"--context {wrong[0]} must be over the {num_tokens} --tokens and at most {most}, the "
            "positions of the model"
        )


def measure_contexts(
    contexts: Sequence[int],
    num_tokens: int,
    *,
    decode: Decode,
    group: LayerGroup,
    repeats: int,
    tell: Callable[[ContextFigures], None],
) -> list[ContextFigures]:
    """Each context in turn of each repeat, after one that does not count.

    `decode` asks the pipeline, which may keep what it knows of a prompt; `group` has all layers.
    """
    rng = random.Random("bench/context")
    vocab_size = group.config.vocab_size
    prompts = {
        context: [rng.randrange(vocab_size) for _ in range(context - num_tokens)]
        for context in contexts
    }
    alone = {context: KernelAlone(group, prompt) for context, prompt in prompts.items()}
    pipeline: Mapping[int, list[float]] = {context: [] for context in contexts}
    kernel: Mapping[int, list[float]] = {context: [] for context in contexts}
    for turn in range(repeats + 1):
        for context, prompt in prompts.items():
            ours = 1e3 * decode(prompt, num_tokens)
            bare = 1e3 * alone[context].decode(num_tokens)[1]
            if turn:
                pipeline[context].append(ours)
                kernel[context].append(bare)
    figures = []
    for context in contexts:
        beside = [a - b for a, b in zip(pipeline[context], kernel[context], strict=True)]
        figures.append(
            ContextFigures(
                context,
                statistics.median(pipeline[context]),
                statistics.median(kernel[context]),
                statistics.median(beside),
            )
        )
        tell(figures[-1])
    return figures


def context_dict(figures: Sequence[ContextFigures], *, threads: int) -> dict[str, Any]:
    return {
        "bench": "decode by context",
        "threads": threads,
        "results": [asdict(f) for f in figures],
    }


def context_lines(figures: Sequence[ContextFigures]) -> list[str]:
    """A table and, on one scale, bars: the kernel's part full, the rest light."""
    most = max(max(f.pipeline_ms, f.kernel_ms) for f in figures)
    lines = ["ms a token: kernel █, beside it ░"]
    for f in figures:
        full = max(1, round(BAR_WIDTH * f.kernel_ms / most))
        rest = max(0, round(BAR_WIDTH * f.pipeline_ms / most) - full)
        lines.append(f"{f.context:>6} {'█' * full}{'░' * rest} {f.pipeline_ms:.2f}")
    if len(figures) > 1:
        first, last = figures[0], figures[-1]
        num_more = (last.context - first.context) / 1000
        lines.append(
            f"per 1,000 positions of context: kernel {_per(first, last, 'kernel_ms', num_more)}, "
            f"beside it {_per(first, last, 'beside_ms', num_more)}"
        )
    return lines


def _per(first: ContextFigures, last: ContextFigures, name: str, num_more: float) -> str:
    if not num_more:
        return "-"
    return f"{(getattr(last, name) - getattr(first, name)) / num_more:+.2f} ms"
