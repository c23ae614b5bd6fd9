"""The tree that commands add themselves to, and the exit codes. Knows no command.

Exit codes: 0 done, 1 the request or model failed, 2 wrong usage or settings, 3 a server does not
answer or, for `status`, something is missing, 4 the cluster takes no more requests for now, 130
interrupted.
"""

from __future__ import annotations

from typing import Annotated

import typer

from shared.errors import CellpipeError, ConfigError, Overloaded, TransientError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_OVERLOADED = 4
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="cellpipe",
    help="Run a large language model on a crowd of small machines.",
    epilog='Example: cellpipe run "Why is the sky blue?"',
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"cellpipe {version('cellpipe')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version)
    ] = False,
) -> None: ...


def exit_code_of(error: CellpipeError) -> int:
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, Overloaded):
        return EXIT_OVERLOADED
    if isinstance(error, TransientError):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED
