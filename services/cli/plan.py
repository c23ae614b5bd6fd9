"""`cellpipe plan`: the bill of a model on a pool of machines, before it is built."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.plan_options import (
    BitsOption,
    ContextOption,
    GroupsOption,
    ModelSpecOption,
    NetworkOption,
    PoolOption,
    SpecsOption,
)
from services.cli.settings import load_config
from services.cli.tree import EXIT_FAILED, app
from shared.errors import ConfigError
from shared.topology import Wire

if TYPE_CHECKING:
    from services.planner.library import Library
    from services.planner.plan import Plan
    from services.planner.section import Section
    from services.planner.specs import ModelSpec

CALIBRATION_FILE = "calibration.toml"


@app.command()
def plan(
    model: ModelSpecOption = "kimi-k2",
    pool: PoolOption = "ps3:100000",
    bits: BitsOption = 4,
    context: ContextOption = 4096,
    prompt: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt. Default: 512, or the context if shorter."),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", "-c", min=1, help="Sequences at a time. Default: the best."),
    ] = None,
    spares: Annotated[
        int, typer.Option(min=0, help="Nodes of every slot that may fail without a loss of rate.")
    ] = 0,
    groups: GroupsOption = None,
    strategy: Annotated[
        str | None, typer.Option(help="pipeline, tensor or expert. Default: the best.")
    ] = None,
    max_token_time: Annotated[
        float | None, typer.Option(min=0.0, help="Seconds that a token may take at most.")
    ] = None,
    network: NetworkOption = "auto",
    wire: Annotated[Wire, typer.Option(help="How hidden states travel.")] = Wire.F32,
    price: Annotated[float, typer.Option(min=0.0, help="Price of a kilowatt-hour.")] = 0.5,
    currency: Annotated[str, typer.Option(help="Its currency.")] = "yuan",
    specs: SpecsOption = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with plots here (needs matplotlib).")
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="Show the names that are known.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """What a model on a pool of machines needs, costs and gives: memory, layer groups, time of a
    token, power, failures, and what breaks first.

    Ends with 0 if it is possible, 1 if not, and then says what is missing.

    Example: cellpipe plan --model kimi-k2 --pool ps3:100000 --context 4096

    Example: cellpipe plan --model llama-3.1-8b --pool rpi5:12,old-pc:3 --concurrency 8
    """
    from services.planner.html import check_html, write_html
    from services.planner.missing import Impossible
    from services.planner.placement import Wishes
    from services.planner.plan import make_plan
    from services.planner.question import DEFAULT_PROMPT, Question
    from services.planner.report import impossible_lines
    from services.planner.report_dict import impossible_dict, plan_dict
    from services.planner.stages import Strategy

    library = open_library(specs or [])
    if listed:
        _print_names(library, as_json)
        return
    if html is not None:
        check_html(html)
    if strategy is not None and strategy not in set(Strategy):
        raise ConfigError(f"--strategy must be pipeline, tensor or expert, got {strategy!r:.80}")
    question = Question(
        bits=bits,
        context=context,
        prompt=prompt or min(DEFAULT_PROMPT, context),
        wire=wire,
        wishes=Wishes(
            concurrency=concurrency,
            spares=spares,
            groups=groups,
            strategy=Strategy(strategy) if strategy else None,
            max_token_s=math.inf if max_token_time is None else max_token_time,
        ),
        price_per_kwh=price,
        currency=currency,
    )
    chosen = find_model(library, model)
    found = make_plan(chosen, library.parse_pool(pool, network=network), question)
    if isinstance(found, Impossible):
        if as_json:
            typer.echo(json.dumps(impossible_dict(found)))
        else:
            for line in impossible_lines(found):
                typer.echo(line)
        raise typer.Exit(EXIT_FAILED)
    if html is not None:
        write_html(found, html)
    if as_json:
        typer.echo(json.dumps(plan_dict(found)))
    else:
        print_plan(found)


def open_library(files: list[Path], *, calibrated: bool = True) -> Library:
    """Our specs, those of this machine's calibration and those of the files."""
    from services.planner.library import builtin_library

    library = builtin_library()
    calibration = load_config(quiet=True).cache_dir / CALIBRATION_FILE
    if calibrated and calibration.exists():
        library.add_file(calibration)
    for file in files:
        library.add_file(file)
    return library


def find_model(library: Library, name: str) -> ModelSpec:
    """By name, or the only one of a file."""
    if not name.endswith(".toml"):
        return library.model(name.lower())
    before = dict(library.models)
    library.add_file(Path(name))
    new = [spec for key, spec in library.models.items() if before.get(key) is not spec]
    if len(new) != 1:
        raise ConfigError(f"{name}: model must be one [model.NAME], got {len(new)}")
    return new[0]


def print_plan(plan: Plan) -> None:
    """The headline and every section as tables."""
    from rich.console import Console

    from services.planner.report import headline, sections

    console = Console(highlight=False)
    console.print(headline(plan), markup=False)
    for section in sections(plan):
        console.print()
        _print_section(console, section)


def _print_section(console: object, section: Section) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    assert isinstance(console, Console), "made above"
    table = Table(title=Text(section.title, style="bold"), box=SIMPLE_HEAD, title_justify="left",
                  pad_edge=False)  # fmt: skip
    for index, name in enumerate(section.header):
        is_text = index in section.text_columns
        table.add_column(Text(name), justify="left" if is_text else "right", overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
    for note in section.notes:
        console.print(Text(f"  {note}", style="dim"))


def _print_names(library: Library, as_json: bool) -> None:
    names = {
        "models": {name: spec.title for name, spec in library.models.items()},
        "hardware": {name: spec.title for name, spec in library.nodes.items()},
        "networks": {name: spec.title for name, spec in library.networks.items()},
        "servers": {name: spec.title for name, spec in library.servers.items()},
    }
    if as_json:
        typer.echo(json.dumps(names))
        return
    for kind, known in names.items():
        typer.echo(f"{kind}:")
        for name, title in sorted(known.items()):
            typer.echo(f"  {name:<16} {title}")
