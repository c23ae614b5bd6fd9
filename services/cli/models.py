"""`cellpipe pull`, `load` and `inspect`: from a model file to shards in the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.progress import StageBar
from services.cli.repacking import repacking_note, repacking_rows, repacking_table
from services.cli.settings import DEFAULT_MODEL, load_config
from services.cli.tree import EXIT_FAILED, app
from shared.config import Config, enough_text, parse_size, size_text
from shared.topology import WORKER_BASE_BYTES, QueueType, Wire

if TYPE_CHECKING:
    from services.loader.layout import GroupPlan, ShardPlan
    from services.loader.packed import PackedModel
    from shared.store.connection import Stores
    from shared.store.shards import ShardStore
    from shared.topology import Layout

ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A catalog name (smollm2-135m), hf:ORG/NAME[@REVISION] or hf:ORG/NAME:FILE.gguf of "
        "the Hugging Face hub, or a path to a .gguf file or a Hugging Face folder."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def pull(model: ModelArgument = DEFAULT_MODEL, as_json: AsJson = False) -> None:
    """Fetch a model into the cache, verified by its digests. What broke off goes on.

    Of a repository of the Hugging Face hub it takes safetensors and the texts beside them, never
    a pickle (.bin) or code.

    Example: cellpipe pull hf:HuggingFaceTB/SmolLM2-135M-Instruct
    """
    from services.loader.pull import resolve_model

    config = load_config()
    with StageBar() as bar:
        path = resolve_model(model, config.cache_dir, progress=bar.show, refresh=True)
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
    verify: Annotated[
        bool,
        typer.Option(
            help="Read every segment back and compare its SHA-256; else lengths alone, which takes "
            "no time for a model that is there."
        ),
    ] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the layout; write nothing to Redis.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Pack a model into shards, put them into Redis and make the layout the active one.

    Idempotent: only what is missing or damaged is sent, so a load that was broken off goes on.

    With --dry-run, exit code 1 when a group does not fit --memory.

    Example: cellpipe load smollm2-135m --groups 3 --dry-run
    """
    from services.cli.session import open_stores
    from services.loader.layout import least_groups_that_fit, plan_layout
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
    note, repacked = repacking_note(manifest.repacked), repacking_rows(manifest.repacked)
    plans = plan_layout(manifest, layout, budget_bytes=budget_bytes)
    fits = all(plan.fits for plan in plans)
    fewest: int | None = groups
    if not fits:
        fewest = least_groups_that_fit(manifest, layout, budget_bytes=budget_bytes)
    if dry_run:
        if as_json:
            rows = [{**asdict(plan), "fits": plan.fits} for plan in plans]
            shown = {"model_id": layout.model_id, "layout_id": layout.layout_id, "wire": wire}
            found = {"groups": rows, "groups_that_fit": fewest, "repacked": repacked}
            typer.echo(json.dumps({**shown, **found}))
        else:
            _print_layout(layout, plans, size_text(budget_bytes))
            if note:
                typer.echo(note)
        if not fits:
            typer.echo(
                f"a worker of {memory} does not hold every group: {_remedy(plans, fewest)}",
                err=True,
            )
            raise typer.Exit(EXIT_FAILED)
        return
    if not fits:
        typer.echo(
            f"note: a worker of --memory {memory} does not hold every group: "
            f"{_remedy(plans, fewest)}",
            err=True,
        )
    with open_stores(config) as stores:
        shards = ShardStore(stores.weights)
        left_behind = _serving_another_layout(stores, shards, layout)
        with StageBar() as bar:
            report = load_model(packed, shards, layout, verify=verify, progress=bar.show)
    if as_json:
        typer.echo(json.dumps({**asdict(report), "repacked": repacked}))
        return
    typer.echo(
        f"{report.model_id} in {_groups(groups)}: {report.total_bytes / 1e6:.1f} MB in "
        f"{report.num_segments} segments, {report.num_sent} sent, "
        + ("all verified" if verify else "lengths compared")
    )
    if note:
        typer.echo(note)
    if left_behind:
        typer.echo(
            f"note: {left_behind} workers serve another layout until they are restarted, "
            "and so does a running scheduler",
            err=True,
        )


@app.command()
def inspect(model: ModelArgument = DEFAULT_MODEL, as_json: AsJson = False) -> None:
    """Show a model's config, its shards and the chunks that the kernel eats.

    A chunk is a block of rows of a matrix, small enough to stay in a local store of 256 KiB beside
    the next one: the unit that is read at once, by one DMA.

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
    console.print(
        "a chunk is a block of rows of a matrix: what the kernel reads at once (a DMA), so small "
        "that two of them stay in a local store of 256 KiB; where 16 rows are too large for that, "
        "they pass through in parts"
    )
    if inspection.repacked:
        console.print(repacking_table(inspection.repacked))
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


def _remedy(plans: Sequence[GroupPlan], fewest: int | None) -> str:
    """What to do when a group does not fit. `fewest` groups would, None for no number."""
    enough = f"workers with --memory {enough_text(max(plan.memory_bytes for plan in plans))}"
    return f"it takes {enough}" + ("" if fewest is None else f", or --groups {fewest}")


def _groups(number: int) -> str:
    return "1 group" if number == 1 else f"{number} groups"


def _packed(config: Config, model: str) -> PackedModel:
    from services.loader.packed import open_model

    with StageBar() as bar:
        return open_model(model, config.cache_dir, progress=bar.show)


def _print_layout(layout: Layout, plans: Sequence[GroupPlan], budget: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "group", "layers", "shards MB", "chunks", "KV bytes per token", "hop bytes per token",
        "worker MB", f"fits {budget}",
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
    console = Console()
    console.print(table)
    console.print(
        f"worker MB are its shards and {WORKER_BASE_BYTES / 1e6:.0f} MB that its process takes "
        "beside them: Python, NumPy, clients, buffers. KV rows come on top, per token of each "
        "request."
    )
