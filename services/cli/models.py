"""`cellpipe pull`, `load` and `inspect`: from a model file to shards in the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.progress import StageBar
from services.cli.settings import DEFAULT_MODEL, load_config
from services.cli.tree import app
from shared.config import Config, parse_size
from shared.topology import QueueType, Wire

if TYPE_CHECKING:
    from services.loader.layout import GroupPlan, ShardPlan
    from services.loader.packed import PackedModel
    from shared.store.connection import Stores
    from shared.store.shards import ShardStore
    from shared.topology import Layout

ModelArgument = Annotated[
    str, typer.Argument(help="A catalog name (smollm2-135m) or a path to a .gguf file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def pull(model: ModelArgument = DEFAULT_MODEL, as_json: AsJson = False) -> None:
    """Fetch a model file into the cache, verified by its SHA-256.

    Example: cellpipe pull smollm2-135m
    """
    from services.loader.pull import resolve_model

    config = load_config()
    with StageBar() as bar:
        path = resolve_model(model, config.cache_dir, progress=bar.show)
    typer.echo(json.dumps({"model": model, "path": str(path)}) if as_json else str(path))


@app.command()
def load(
    model: ModelArgument = DEFAULT_MODEL,
    groups: Annotated[int, typer.Option("--groups", "-g", help="Number of layer groups.")] = 1,
    memory: Annotated[
        str, typer.Option(help="Memory of one worker, to say whether each group fits.")
    ] = "256MiB",
    queue_type: Annotated[
        QueueType,
        typer.Option(help="Type of the step queues, all of the layout. classic is faster."),
    ] = QueueType.CLASSIC,
    wire: Annotated[
        Wire,
        typer.Option(
            help="How hidden states travel between groups. For slow links: f16 takes half of the "
            "bytes, i8 a little over a quarter. Both round at every hop, so that tokens depend "
            "on --groups too."
        ),
    ] = Wire.F32,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the layout; write nothing to Redis.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pack a model into shards, put them into Redis and make the layout the active one.

    Idempotent: only what is missing or damaged is sent, so a load that was broken off goes on.

    Example: cellpipe load smollm2-135m --groups 3 --dry-run
    """
    from services.cli.session import open_stores
    from services.loader.layout import plan_layout
    from services.loader.upload import load_model
    from shared.store.shards import ShardStore
    from shared.topology import even_layout

    config = load_config()
    budget_bytes = parse_size(memory, field="--memory")
    packed = _packed(config, model)
    manifest = packed.manifest
    layout = even_layout(
        manifest.model_id,
        manifest.config["num_hidden_layers"],
        groups,
        queue_type,
        wire,
    )
    plans = plan_layout(manifest, layout, budget_bytes=budget_bytes)
    if dry_run:
        if as_json:
            rows = [{**asdict(plan), "fits": plan.fits} for plan in plans]
            shown = {"model_id": layout.model_id, "layout_id": layout.layout_id, "wire": wire}
            typer.echo(json.dumps({**shown, "groups": rows}))
        else:
            _print_layout(layout, plans, budget_bytes)
        return
    for plan in plans:
        if not plan.fits:
            typer.echo(
                f"note: group {plan.group} needs {plan.memory_bytes / 1e6:.0f} MB, more than "
                f"--memory {memory}; its workers need `--memory` to match, or use more groups",
                err=True,
            )
    with open_stores(config) as stores:
        shards = ShardStore(stores.weights)
        left_behind = _serving_another_layout(stores, shards, layout)
        with StageBar() as bar:
            report = load_model(packed, shards, layout, progress=bar.show)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
        return
    typer.echo(
        f"{report.model_id} in {_groups(groups)}: {report.total_bytes / 1e6:.1f} MB in "
        f"{report.num_segments} segments, {report.num_sent} sent, all verified"
    )
    if left_behind:
        typer.echo(
            f"note: {left_behind} workers serve another layout until they are restarted, "
            "and so does a running scheduler",
            err=True,
        )


@app.command()
def inspect(model: ModelArgument = DEFAULT_MODEL, as_json: AsJson = False) -> None:
    """Show a model's config, its shards and the chunks that the kernel eats.

    Example: cellpipe inspect ./model.gguf --json
    """
    from services.loader.layout import inspect_model

    config = load_config()
    inspection = inspect_model(_packed(config, model).manifest)
    if as_json:
        typer.echo(json.dumps({**asdict(inspection), "config": inspection.config.to_dict()}))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{inspection.model_id}[/bold]  from {inspection.source}")
    for key, value in inspection.config.to_dict().items():
        console.print(f"  {key:26} {value}")
    shards = Table("shard", "MB", "segments", "chunks = DMAs", title="shards")
    for names, shard in _runs_of_equal_shards(inspection.shards):
        shards.add_row(
            names,
            f"{shard.num_bytes / 1e6:.2f}",
            str(shard.num_segments),
            str(shard.num_chunks),
        )
    console.print(shards)
    matrices = Table(
        "matrix", "kind", "rows", "cols", "MB", "chunks", "rows/chunk", "KiB/chunk",
        title=f"chunks of {inspection.layers[0].name}",
    )  # fmt: skip
    for matrix in inspection.layers[0].matrices:
        if matrix.num_chunks:
            matrices.add_row(
                matrix.name,
                matrix.kind,
                str(matrix.rows),
                str(matrix.cols),
                f"{matrix.num_bytes / 1e6:.2f}",
                str(matrix.num_chunks),
                str(matrix.chunk_rows),
                f"{matrix.chunk_bytes / 1024:.1f}",
            )
    console.print(matrices)
    console.print(f"total {inspection.num_bytes / 1e6:.1f} MB in {inspection.num_chunks} chunks")


def _runs_of_equal_shards(shards: Sequence[ShardPlan]) -> list[tuple[str, ShardPlan]]:
    """Neighbours that differ in name alone, as one line: layer.0 .. layer.29."""
    runs: list[tuple[str, ShardPlan]] = []
    for _, run in groupby(shards, key=lambda s: (s.num_bytes, s.num_segments, s.num_chunks)):
        first, *rest = run
        name = f"{first.name} .. {rest[-1].name}" if rest else first.name
        runs.append((name, first))
    return runs


def _serving_another_layout(stores: Stores, shards: ShardStore, layout: Layout) -> int:
    """How many live workers serve a layout that is not the one being loaded."""
    from shared.errors import ModelError
    from shared.store.presence import Presence

    try:
        current = shards.active_layout("")
    except ModelError:
        return 0  # nothing is loaded yet
    return 0 if current == layout else len(Presence(stores.meta).workers(current))


def _groups(number: int) -> str:
    return "1 group" if number == 1 else f"{number} groups"


def _packed(config: Config, model: str) -> PackedModel:
    from services.loader.packed import open_model

    with StageBar() as bar:
        return open_model(model, config.cache_dir, progress=bar.show)


def _print_layout(layout: Layout, plans: Sequence[GroupPlan], budget_bytes: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "group", "layers", "shards MB", "chunks", "KV bytes per token", "hop bytes per token",
        "worker MB", f"fits {budget_bytes / 1e6:.1f} MB",
        title=f"{layout.model_id} in {_groups(len(plans))}, {layout.wire} wire",
    )  # fmt: skip
    for plan in plans:
        table.add_row(
            str(plan.group),
            f"{plan.first_layer}..{plan.end_layer - 1}",
            f"{plan.shard_bytes / 1e6:.1f}",
            str(plan.num_chunks),
            str(plan.kv_bytes_per_position),
            str(plan.hop_bytes_per_position or "-"),
            f"{plan.memory_bytes / 1e6:.1f}",
            "yes" if plan.fits else "NO",
        )
    Console().print(table)
