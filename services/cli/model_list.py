"""`cellpipe models`: the models that have a name here."""

from __future__ import annotations

import json

import typer

from services.cli.models import AsJson
from services.cli.settings import load_config
from services.cli.tree import app


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the catalog's models and those that were pulled from the hub.

    Example: cellpipe models --json
    """
    from services.loader.pull import known_models

    config = load_config()
    known = known_models(config.cache_dir)
    if as_json:
        rows = [
            {"name": m.name, "num_bytes": m.num_bytes, "path": str(m.path) if m.path else None}
            for m in known
        ]
        typer.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "MB", "where")
    for model in known:
        where = str(model.path) if model.path else f"not here yet: cellpipe pull {model.name}"
        table.add_row(model.name, f"{model.num_bytes / 1e6:.1f}", where)
    Console().print(table)
