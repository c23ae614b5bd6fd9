"""`cellpipe worker`, `scheduler` and `status`: the processes of a cluster, and how they do."""

from __future__ import annotations

import json
import os
import signal
import threading
from types import FrameType
from typing import Annotated

import typer

from services.cli.settings import load_config, with_cluster_urls
from services.cli.tree import EXIT_UNAVAILABLE, app
from shared.config import parse_size

# Redis flushes its append-only file each second, and puts a write off for two if the disk is slow.
STORE_FLUSH_S = 3.0

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="A loaded model, by its name, name@digest or name in the catalog. "
        "Default: the one loaded last.",
        show_default=False,
    ),
]


@app.command()
def worker(
    model: ModelOption = "",
    group: Annotated[
        list[int] | None,
        typer.Option(
            "--group",
            help="Serve this layer group and no other; may be repeated. "
            "Default: the least covered one.",
        ),
    ] = None,
    memory: Annotated[
        str,
        typer.Option(
            help="Memory of this process in all: 90 MB, its shards, and the rows of requests."
        ),
    ] = "256MiB",
    threads: Annotated[int, typer.Option(help="Threads that compute; 0 is one a core.", min=0)] = 1,
    hang_limit: Annotated[
        float,
        typer.Option(help="Seconds that one batch may compute before the process ends.", min=1),
    ] = 30.0,
) -> None:
    """Serve layer groups of the active layout until SIGTERM or Ctrl-C.

    Takes the group with the fewest workers; with memory to spare it also takes groups that no
    worker serves.

    Example: cellpipe worker --group 2 --memory 160MiB
    """
    from services.cli.session import kernel_backend, open_cluster
    from services.worker.faults import Faults
    from services.worker.service import WorkerOptions, WorkerService

    config = load_config()
    options = WorkerOptions(
        model=model,
        groups=tuple(group or ()),
        memory_bytes=parse_size(memory, field="--memory"),
        hang_limit_s=hang_limit,
    )
    stopping = stop_on_signals()
    with open_cluster(config, runs_in_taker=True) as (broker, stores):
        WorkerService(
            options,
            broker=broker,
            stores=stores,
            backend=kernel_backend(config, threads),
            stopping=stopping,
            faults=Faults.from_environ(os.environ),
        ).run()


@app.command()
def scheduler(
    model: ModelOption = "",
    kv_budget: Annotated[
        str,
        typer.Option(help="KV memory of the requests that run at once; others wait their turn."),
    ] = "1GiB",
    prefix_budget: Annotated[
        str, typer.Option(help="KV memory for what prompts begin with, kept for others, beside it.")
    ] = "256MiB",
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt from its beginning.")
    ] = False,
    max_requests: Annotated[
        int, typer.Option(help="Requests that run at once.", min=1, max=65_535)
    ] = 256,
    max_batch_requests: Annotated[
        int, typer.Option(help="Of these, requests of batches, while nobody else waits.", min=1)
    ] = 32,
) -> None:
    """Admit, start and answer requests until SIGTERM or Ctrl-C.

    Drives on what stands still. Several may run; each has a budget of its own, so give each a
    share of the memory of the KV server. The prefix budget is one for all of them.

    Example: cellpipe scheduler --kv-budget 512MiB
    """
    from services.cli.session import open_cluster
    from services.scheduler.limits import SchedulerLimits
    from services.scheduler.service import SchedulerService

    config = load_config()
    limits = SchedulerLimits(
        max_in_flight=max_requests,
        max_batch_in_flight=max_batch_requests,
        settle_after_s=STORE_FLUSH_S,
        kv_budget_bytes=parse_size(kv_budget, field="--kv-budget"),
        prefix_budget_bytes=(
            None if no_prefix_cache else parse_size(prefix_budget, field="--prefix-budget")
        ),
    )
    stopping = stop_on_signals()
    with open_cluster(config) as (broker, stores):
        SchedulerService(
            model=model, broker=broker, stores=stores, stopping=stopping, limits=limits
        ).run()


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show servers, layer groups, workers and queues. Exit code 3 when something is missing.

    Example: cellpipe status --json
    """
    from services.cli.overview import print_overview, read_overview

    overview = read_overview(with_cluster_urls(load_config(quiet=True)))
    if as_json:
        typer.echo(json.dumps(overview.to_dict()))
    else:
        print_overview(overview)
    if overview.problems:
        raise typer.Exit(EXIT_UNAVAILABLE)


def stop_on_signals() -> threading.Event:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process at once."""
    stopping = threading.Event()

    def stop(number: int, _: FrameType | None) -> None:
        stopping.set()
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    return stopping
