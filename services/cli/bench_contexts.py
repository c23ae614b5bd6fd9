"""`cellpipe bench decode --context`, and how one answer is timed, with and without a pipeline."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from services.cli.settings import load_config
from shared.messages import Request, SamplingParams

if TYPE_CHECKING:
    from services.bench.context import ContextFigures
    from services.cli.session import Session
    from shared.config import Config
    from shared.model.layer_group import LayerGroup


def bench_contexts(
    contexts: Sequence[int],
    model: str,
    threads: int,
    tokens: int,
    repeats: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Measure, draw and print. Raises `ConfigError` for a context that the model does not hold."""
    from services.bench.context import (
        check_contexts,
        context_dict,
        context_lines,
        measure_contexts,
    )
    from services.bench.plot import check_plot, draw_contexts
    from services.cli.session import open_session

    config = load_config(quiet=True)
    if plot is not None:
        check_plot(plot)
    threads = threads or len(os.sched_getaffinity(0))
    group = load_whole(config, model, threads)
    check_contexts(contexts, tokens, group.config)
    with open_session(
        config, model=model, cluster=False, num_groups=1, num_threads=threads, prefix_cache=True
    ) as session:

        def ask(prompt: Sequence[int], num_tokens: int) -> float:
            return follow(session, prompt, num_tokens).token_s

        figures = measure_contexts(
            contexts,
            tokens,
            decode=ask,
            group=group,
            repeats=repeats,
            tell=(lambda _: None) if as_json else _say_context,
        )
        model_id = session.model_id
    if plot is not None:
        draw_contexts(figures, model_id, plot)
    lines = (
        [json.dumps(context_dict(figures, threads=threads))] if as_json else context_lines(figures)
    )
    for line in lines:
        typer.echo(line)


def _say_context(f: ContextFigures) -> None:
    typer.echo(
        f"context {f.context}: {f.pipeline_ms:.2f} ms a token, kernel {f.kernel_ms:.2f}, "
        f"beside it {f.beside_ms:.2f}"
    )


def load_whole(config: Config, model: str, threads: int) -> LayerGroup:
    """All layers and both ends of a model, to be computed by a kernel of their own."""
    from services.cli.session import kernel_backend
    from services.embedded import load_group
    from services.loader.packed import open_model
    from shared.model.config import ModelConfig
    from shared.topology import even_layout

    packed = open_model(model, config.cache_dir)
    num_layers = ModelConfig.from_dict(packed.manifest.config).num_hidden_layers
    layout = even_layout(packed.manifest.model_id, num_layers, 1)
    backend = kernel_backend(config, threads)
    return load_group(packed.manifest, layout, 0, packed.read_shard, backend)


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Seconds from submission to the first and to the last of the tokens."""

    token_ids: list[int]
    first_s: float
    last_s: float

    @property
    def token_s(self) -> float:
        """Seconds a token after the first."""
        return (self.last_s - self.first_s) / (len(self.token_ids) - 1)


def follow(session: Session, prompt: Sequence[int], num_tokens: int) -> TimedAnswer:
    """Ask for so many greedy tokens.

    Without drafts: an answer that goes round in circles would flatter us beside a peer.
    """
    from shared.producer import new_request_id
    from shared.store.ledger_types import TokenEvent

    request = Request(
        request_id=new_request_id(),
        token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True, speculation=False),
    )
    started_s = time.perf_counter()
    session.producer.submit(request)
    arrivals = [
        (event.token_id, time.perf_counter() - started_s)
        for event in session.producer.events(request.request_id, on_silence=session.check)
        if isinstance(event, TokenEvent)
    ]
    return TimedAnswer([token_id for token_id, _ in arrivals], arrivals[0][1], arrivals[-1][1])
