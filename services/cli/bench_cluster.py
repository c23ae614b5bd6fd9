"""`cellpipe bench cluster`: how fast a cluster on this machine is, and where its time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from services.cli.bench import AsJson, PeerModel, bench
from services.cli.progress import Teller
from services.cli.settings import DEFAULT_MODEL, load_config
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
        str, typer.Option("--concurrency", "-c", help="Requests at a time, each a load.")
    ] = "1,4,16,32",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 16,
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

    Example: cellpipe bench cluster --groups 1,2 --concurrency 1,4,16 --rounds 5
    """
    from services.bench.cluster import measure_cluster
    from services.bench.llama_cluster import open_llama_peer
    from services.bench.options import ClusterOptions
    from services.bench.plot import check_plot, draw
    from services.bench.report import to_dict, to_lines
    from services.loader.pull import resolve_model

    config = load_config(quiet=True)
    options = ClusterOptions(
        model=model,
        num_groups=_numbers(groups, field="--groups"),
        workers_per_group=workers,
        threads=threads,
        concurrency=_numbers(concurrency, field="--concurrency", most=256),
        num_tokens=tokens,
        num_prompt=prompt_tokens,
        rounds=rounds,
        memory=memory,
        queue_type=queue_type,
        wire=wire,
        log_folder=logs,
    )
    if plot is not None:
        check_plot(plot)
    open_peer = None
    if peer_bin is not None:
        file = peer_model or resolve_model(model, config.cache_dir)
        open_peer = open_llama_peer(peer_bin, file, options)
    figures = measure_cluster(options, open_peer=open_peer, say=Teller().say)
    if plot is not None:
        draw(figures, plot)
    if as_json:
        typer.echo(json.dumps(to_dict(figures)))
    else:
        for line in to_lines(figures):
            typer.echo(line)


def _numbers(text: str, *, field: str, most: int = 1024) -> tuple[int, ...]:
    """1,4,16 as numbers, each once, in their order. Raises `ConfigError` naming the field."""
    pieces = text.replace(" ", "").split(",")
    if not all(piece.isascii() and piece.isdigit() for piece in pieces):
        raise ConfigError(f"{field} must be numbers such as 1,4,16, got {text!r}")
    numbers = tuple(dict.fromkeys(map(int, pieces)))
    if not all(1 <= number <= most for number in numbers):
        raise ConfigError(f"{field} must be in 1..{most}, got {text!r}")
    return numbers
