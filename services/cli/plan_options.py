"""The options that `cellpipe plan` and `cellpipe simulate` share. Reads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelSpecOption = Annotated[
    str,
    typer.Option("--model", "-m", help="A name, or a .toml file with one [model.NAME]."),
]
PoolOption = Annotated[
    str,
    typer.Option(
        "--pool", "-p", help="Machines: ps3:100000,rpi5:12, or a .toml file with a [pool]."
    ),
]
BitsOption = Annotated[int, typer.Option(help="Bits of a weight: 4, 8 or 16.")]
ContextOption = Annotated[int, typer.Option(min=1, help="Positions that a sequence may have.")]
GroupsOption = Annotated[
    int | None, typer.Option("--groups", "-g", min=1, help="Layer groups. Default: the best.")
]
NetworkOption = Annotated[str, typer.Option(help="What joins the machines.")]
SpecsOption = Annotated[
    list[Path] | None,
    typer.Option(help="A .toml file with your hardware, networks, servers or models."),
]
