"""`cellpipe bench decode --context`, and how one answer is timed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from services.cli.settings import load_config
from shared.messages import Request, SamplingParams

if TYPE_CHECKING:
    from services.bench.context import ContextFigures
    from services.cli.session import Session


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
    from services.cli.session import kernel_backend, open_session
    from services.embedded import load_group
    from services.loader.packed import open_packed
    from services.loader.pull import resolve_model
    from shared.model.config import ModelConfig
    from shared.topology import even_layout

    config = load_config(quiet=True)
    if plot is not None:
        check_plot(plot)
    threads = threads or len(os.sched_getaffinity(0))
    packed = open_packed(resolve_model(model, config.cache_dir), config.cache_dir)
    model_config = ModelConfig.from_dict(packed.manifest.config)
    check_contexts(contexts, tokens, model_config)
    layout = even_layout(packed.manifest.model_id, model_config.num_hidden_layers, 1)
    group = load_group(
        packed.manifest, layout, 0, packed.read_shard, kernel_backend(config, threads)
    )
    with open_session(
        config, model=model, cluster=False, num_groups=1, num_threads=threads, prefix_cache=True
    ) as session:

        def ask(prompt: Sequence[int], num_tokens: int) -> float:
            first_s, last_s = follow(session, prompt, num_tokens)
            return (last_s - first_s) / (num_tokens - 1)

        figures = measure_contexts(
            contexts,
            tokens,
            decode=ask,
            group=group,
            repeats=repeats,
            tell=(lambda _: None) if as_json else _say_context,
        )
    if plot is not None:
        draw_contexts(figures, packed.manifest.model_id, plot)
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


def follow(session: Session, prompt: Sequence[int], num_tokens: int) -> tuple[float, float]:
    """Seconds from submission to the first and to the last token.

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
        time.perf_counter() - started_s
        for event in session.producer.events(request.request_id, on_silence=session.check)
        if isinstance(event, TokenEvent)
    ]
    return arrivals[0], arrivals[-1]
