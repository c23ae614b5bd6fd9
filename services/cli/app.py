"""The command tree, and how a command ends. Knows no command's work.

Exit codes: 0 done, 1 the request or model failed, 2 wrong usage or settings, 3 a server or worker
is missing, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from shared.errors import CellpipeError, ConfigError, TransientError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="cellpipe",
    help="Run a large language model on a crowd of small machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def exit_code_of(error: CellpipeError) -> int:
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, TransientError):
        return EXIT_UNAVAILABLE
    return EXIT_FAILED


def main(argv: list[str] | None = None) -> Any:
    """Entry point. Every error of ours becomes one line, its remedy a second, and an exit code."""
    # Each adds its commands to `app`.
    import services.cli.bench
    import services.cli.cluster
    import services.cli.generate
    import services.cli.models  # noqa: F401

    try:
        return app(args=argv, prog_name="cellpipe")
    except CellpipeError as error:
        from shared.logs import redact

        sys.stdout.flush()
        print(f"cellpipe: {redact(str(error))}", file=sys.stderr)
        if error.remedy:
            print(f"  {redact(error.remedy)}", file=sys.stderr)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader went away (`cellpipe … | head`): not an error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
