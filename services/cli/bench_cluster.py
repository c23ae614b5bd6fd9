"""`cellpipe bench cluster`: how fast a cluster on this machine is, and where its time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from services.cli.bench import AsJson, PeerModel, bench
from services.cli.progress import Teller
from services.cli.settings import DEFAULT_MODEL, load_config, numbers
from services.cli.terminating import end_clean_at_sigterm
from shared.errors import ConfigError
from shared.topology import QueueType, Wire


@bench.command()
def cluster(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A catalog name or a path to a .gguf file.")
    ] = DEFAULT_MODEL,
    groups: Annotated[
        str, typer.Option("--groups", "-g", help="Layer groups; several to compare: 1,2,3.")
    ] = "2",
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Workers of each group.")
    ] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each worker.")] = 1,
    concurrency: Annotated[
        str,
        typer.Option(
            "--concurrency",
            "-c",
            help="Requests at a time, each a load. Default: 1,4,16,32, or 8 with --mixed.",
            show_default=False,
        ),
    ] = "",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of each prompt. Default: 16, or 512 with --mixed."),
    ] = None,
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed", help="Long prompts, one at a time, beside streams that decode, and alone."
        ),
    ] = False,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round of --mixed.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are shown.")] = 3,
    queue_type: Annotated[
        QueueType, typer.Option(help="Type of the step queues.")
    ] = QueueType.CLASSIC,
    wire: Annotated[Wire, typer.Option(help="How hidden states travel.")] = Wire.F32,
    memory: Annotated[str, typer.Option(help="Memory of each worker.")] = "256MiB",
    peer_bin: Annotated[
        Path | None,
        typer.Option(
            "--peer-bin",
            help="A folder with llama.cpp's llama-server and, for two groups or more, rpc-server: "
            "they get the same split and load, in turns with us. A llama-bench is run too.",
        ),
    ] = None,
    peer_model: PeerModel = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw throughput into this PNG file (needs matplotlib).")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Keep the logs of all processes in this folder.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second, latency and the cost of a hop of a cluster on this machine.

    Starts RabbitMQ, Redis, a scheduler and workers of its own, and ends them. Measured beside a raw
    message through RabbitMQ and a raw Redis round trip.

    With --mixed: what a long prompt costs streams that decode, and they it.

    Example: cellpipe bench cluster --groups 1,2 --concurrency 1,4,16 --rounds 5
    """
    from services.bench.cluster import measure_cluster
    from services.bench.llama_cluster import open_llama_peer
    from services.bench.mixed import measure_mixed, mixed_dict, mixed_lines
    from services.bench.options import ClusterOptions
    from services.bench.plot import check_plot, draw
    from services.bench.report import to_dict, to_lines
    from services.loader.pull import resolve_model

    end_clean_at_sigterm()
    config = load_config(quiet=True)
    options = ClusterOptions(
        model=model,
        num_groups=numbers(groups, field="--groups"),
        workers_per_group=workers,
        threads=threads,
        concurrency=numbers(
            concurrency or ("8" if mixed else "1,4,16,32"), field="--concurrency", most=256
        ),
        num_tokens=tokens,
        num_prompt=prompt_tokens or (512 if mixed else 16),
        rounds=rounds,
        memory=memory,
        queue_type=queue_type,
        wire=wire,
        log_folder=logs,
    )
    if mixed:
        if plot is not None or peer_bin is not None:
            raise ConfigError("--mixed has neither --plot nor --peer-bin")
        if len(options.num_groups) > 1 or len(options.concurrency) > 1:
            raise ConfigError("--mixed takes one number of --groups and one of --concurrency")
        mixed_figures = measure_mixed(options, num_prompts=prompts, say=Teller().say)
        _print(as_json, mixed_dict(mixed_figures), mixed_lines(mixed_figures))
        return
    if plot is not None:
        check_plot(plot)
    open_peer = None
    if peer_bin is not None:
        file = peer_model or resolve_model(model, config.cache_dir)
        open_peer = open_llama_peer(peer_bin, file, options)
    figures = measure_cluster(options, open_peer=open_peer, say=Teller().say)
    if plot is not None:
        draw(figures, plot)
    _print(as_json, to_dict(figures), to_lines(figures))


def _print(as_json: bool, shown: dict[str, Any], lines: list[str]) -> None:
    for line in [json.dumps(shown)] if as_json else lines:
        typer.echo(line)
