"""`cellpipe bench`: how fast the kernel and the embedded pipeline are on this machine."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.bench_contexts import bench_contexts, follow, load_whole
from services.cli.generate import Threads
from services.cli.settings import DEFAULT_MODEL, load_config, numbers
from services.cli.tree import app
from shared.errors import ConfigError, KernelError

if TYPE_CHECKING:
    from services.bench.kernel import KernelFigures
    from services.cli.session import Session
    from shared.model.layer_group import LayerGroup

bench = typer.Typer(
    help="Measure speed on this machine, in medians of interleaved runs.",
    epilog="Example: cellpipe bench decode",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Model = Annotated[
    str, typer.Option("--model", "-m", help="A catalog name or a path to a .gguf file.")
]
Repeats = Annotated[int, typer.Option(help="Turns that count.", min=1)]
PeerName = Annotated[
    str | None, typer.Option("--peer", help="llama.cpp: run the xllamacpp wheel in turns with us.")
]
PeerBin = Annotated[
    Path | None, typer.Option("--peer-bin", help="A llama-bench to run in turns with us.")
]
PeerModel = Annotated[
    Path | None, typer.Option("--peer-model", help="A .gguf for the peer. Default: our own.")
]


@bench.command()
def kernel(
    path: Annotated[
        list[str] | None, typer.Option("--path", help="An instruction set. Default: all here.")
    ] = None,
    repeats: Repeats = 7,
    stream_mib: Annotated[
        int, typer.Option(help="Size of the matrix of batch 1; 0 is twice the cache.", min=0)
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Matrix products beside the memory's and the instruction set's limits.

    Example: cellpipe bench kernel --path avx2
    """
    from services.bench.kernel import measure_kernels
    from shared.kernel.names import REFERENCE
    from shared.model.backend import available_kernels

    load_config(quiet=True)
    here = [name for name in available_kernels() if name != REFERENCE]
    if not here:
        raise ConfigError("the C kernel was not built", remedy="python -m shared.kernel.build")
    if lacking := set(path or ()) - set(here):
        raise ConfigError(f"this machine has no {', '.join(lacking)}; it has {', '.join(here)}")
    cores = len(os.sched_getaffinity(0))
    figures = measure_kernels(
        path or here,
        (1, cores) if cores > 1 else (1,),
        repeats=repeats,
        streamed_bytes=stream_mib << 20 or None,
        tell=(lambda _: None) if as_json else _say_kernel,
    )
    if as_json:
        typer.echo(json.dumps({"cores": cores, "paths": _by_path(figures)}))


def _by_path(figures: list[KernelFigures]) -> dict[str, Any]:
    """The shares of a path are those of one core."""
    paths: dict[str, Any] = {}
    for figure in figures:
        entry = paths.setdefault(
            figure.path,
            {"bandwidth_share": figure.bandwidth_share, "compute_share": figure.compute_share},
        )
        shown = {**asdict(figure), "doubts": figure.doubts()}
        entry["one_core" if figure.threads == 1 else "all_cores"] = shown
    return paths


def _say_kernel(f: KernelFigures) -> None:
    typer.echo(
        f"{f.path}, {f.threads} thread{'s' if f.threads > 1 else ''}: "
        f"registers give {f.peak_multiply_adds_per_s / 1e9:.0f} G multiply-adds/s"
    )
    for kind, rate in f.weight_bytes_per_s.items():
        typer.echo(
            f"  {kind} batch 1:  {rate / 1e9:5.1f} GB/s of weights, {f.bandwidth_shares[kind]:.0%} "
            f"of reading ({f.read_bytes_per_s[kind] / 1e9:.1f} GB/s)"
        )
    for batch, rate in f.multiply_adds_per_s.items():
        share = f.compute_shares[batch]
        typer.echo(f"  int4 batch {batch:>2}: {rate / 1e9:5.0f} G multiply-adds/s, {share:.0%}")
    if doubts := f.doubts():
        typer.echo(
            f"  doubtful, for something else ran: {'; '.join(doubts)}. Run it again", err=True
        )


@bench.command()
def decode(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    tokens: Annotated[int, typer.Option(help="Tokens of a run.", min=2)] = 64,
    repeats: Repeats = 5,
    context: Annotated[
        str, typer.Option(help="Milliseconds a token at these contexts, beside the bare kernel.")
    ] = "",
    plot: Annotated[
        Path | None, typer.Option(help="Draw --context into this PNG file (needs matplotlib).")
    ] = None,
    peer: PeerName = None,
    peer_bin: PeerBin = None,
    peer_model: PeerModel = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of one answer from the embedded pipeline, and how much of a step is not
    the kernel's.

    Example: cellpipe bench decode --peer llama.cpp
    Example: cellpipe bench decode --context 128,512,2048
    """
    if context:
        if peer or peer_bin or peer_model:
            raise ConfigError("--context is measured beside our own kernel, not beside a peer")
        bench_contexts(
            numbers(context, field="--context", most=1 << 20),
            model, threads, tokens, repeats, plot, as_json,
        )  # fmt: skip
        return
    if plot is not None:
        raise ConfigError("--plot goes with --context")
    _bench_model("decode", [tokens], model, threads, repeats, peer, peer_bin, peer_model, as_json)


@bench.command()
def prefill(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    tokens: Annotated[list[int] | None, typer.Option(help="Prompt size; may be repeated.")] = None,
    repeats: Repeats = 5,
    peer: PeerName = None,
    peer_bin: PeerBin = None,
    peer_model: PeerModel = None,
    as_json: AsJson = False,
) -> None:
    """Prompt tokens per second of the embedded pipeline, up to the first token of the answer.

    Example: cellpipe bench prefill --tokens 128 --peer llama.cpp
    """
    sizes = tokens or [128, 512]
    _bench_model("prefill", sizes, model, threads, repeats, peer, peer_bin, peer_model, as_json)


def _bench_model(
    what: str,
    sizes: list[int],
    model: str,
    threads: int,
    repeats: int,
    peer: str | None,
    peer_bin: Path | None,
    peer_model: Path | None,
    as_json: bool,
) -> None:
    from services.bench.figures import interleave, median_overhead, median_ratio
    from services.bench.peer import open_peer
    from services.cli.session import open_session
    from services.loader.pull import resolve_model

    config = load_config(quiet=True)
    threads = threads or len(os.sched_getaffinity(0))
    peer_file = peer_model or resolve_model(model, config.cache_dir)
    opener = open_peer(peer_file, threads, peer=peer, binary=peer_bin)
    alone = load_whole(config, model, threads) if what == "decode" else None
    results = []
    with open_session(  # the same prompt again and again would be read from the cache
        config,
        model=model,
        cluster=False,
        num_groups=1,
        num_threads=threads,
        prefix_cache=False,
    ) as session:
        other = opener() if opener else None
        for size in sizes:
            measures = _measures(session, what, size, alone)
            if other is not None:
                run = other.decode if what == "decode" else other.prefill
                measures["peer"] = lambda run=run, size=size: run(size)  # type: ignore[misc]
            rates = interleave(measures, repeats)
            result: dict[str, Any] = {"tokens": size}
            result |= {f"{name}_tokens_per_s": statistics.median(r) for name, r in rates.items()}
            if alone is not None:
                result["overhead_share"] = median_overhead(rates, "cellpipe", "kernel")
            if other is not None:
                result["ratio"] = median_ratio(rates, "cellpipe", "peer")
            results.append(result)
            if not as_json:
                _say_model(what, threads, result)
    if as_json:
        typer.echo(json.dumps({"bench": what, "threads": threads, "results": results}))


def _measures(
    session: Session, what: str, size: int, alone: LayerGroup | None
) -> dict[str, Callable[[], float]]:
    """One request; its rate by the clock of whoever waits for the tokens.

    `alone` then computes the same tokens without a pipeline.
    """
    if alone is None:
        return {
            "cellpipe": lambda: size / follow(session, [100 + i for i in range(size)], 1).first_s
        }
    from services.bench.alone import KernelAlone

    prompt = [10]
    kernel = KernelAlone(alone, prompt)
    ours: list[int] = []

    def decode() -> float:
        answer = follow(session, prompt, size)
        ours[:] = answer.token_ids
        return 1 / answer.token_s

    def decode_alone() -> float:
        token_ids, token_s = kernel.decode(size)
        if token_ids != ours:
            raise KernelError("the pipeline and the kernel alone gave different tokens")
        return 1 / token_s

    return {"cellpipe": decode, "kernel": decode_alone}


def _say_model(what: str, threads: int, result: dict[str, Any]) -> None:
    line = (
        f"{what} {result['tokens']} tokens, {threads} threads: "
        f"{result['cellpipe_tokens_per_s']:.1f} tok/s"
    )
    if "overhead_share" in result:
        line += (
            f", the kernel alone {result['kernel_tokens_per_s']:.1f}: "
            f"{result['overhead_share']:.1%} of a step is not the kernel's"
        )
    if "ratio" in result:
        line += f", llama.cpp {result['peer_tokens_per_s']:.1f}, ratio {result['ratio']:.2f}"
    typer.echo(line)
