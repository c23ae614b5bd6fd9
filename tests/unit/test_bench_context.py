"""The cost of a token by its context, from values with known answers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from services.bench.context import (
    ContextFigures,
    check_contexts,
    context_dict,
    context_lines,
    measure_contexts,
)
from services.bench.plot import check_plot, draw_contexts
from shared.errors import ConfigError
from tests.rig_model import rig_layer_group
from tests.tiny_model import tiny_config

FIGURES = [ContextFigures(100, 6.0, 5.0, 1.0), ContextFigures(2_100, 12.0, 9.0, 3.0)]


def test_growth_is_told_per_thousand_positions_for_kernel_and_rest() -> None:
    lines = context_lines(FIGURES)

    assert lines[-1] == "per 1,000 positions of context: kernel +2.00 ms, beside it +1.00 ms"
    assert [(line.count("█"), line.count("░")) for line in lines[1:-1]] == [(17, 3), (30, 10)]
    assert context_dict(FIGURES, threads=2)["results"][1]["beside_ms"] == 3.0


def test_each_context_is_measured_over_its_last_positions() -> None:
    asked: list[tuple[int, int]] = []

    def decode(prompt: object, num_tokens: int) -> float:
        asked.append((len(prompt), num_tokens))  # type: ignore[arg-type]
        return 0.5

    told: list[ContextFigures] = []
    figures = measure_contexts(
        (12, 40), 4, decode=decode, group=rig_layer_group(1, 0), repeats=2, tell=told.append
    )

    assert asked == [(8, 4), (36, 4)] * 3
    assert told == figures
    assert [f.context for f in figures] == [12, 40]
    assert all(f.pipeline_ms == 500.0 and f.kernel_ms > 0 for f in figures)


def test_a_context_that_the_model_does_not_hold_is_refused() -> None:
    config = tiny_config()

    check_contexts((9, 256), 8, config)
    for context in (8, 257):
        with pytest.raises(ConfigError, match=f"--context {context}"):
            check_contexts((64, context), 8, config)


def test_a_picture_is_drawn_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"

    if find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="matplotlib"):
            check_plot(path)
    else:
        draw_contexts(FIGURES, "tiny@1", path)
        assert path.read_bytes().startswith(b"\x89PNG")
