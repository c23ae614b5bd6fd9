"""The entry point of `cellpipe`, and how a command ends."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

# Each adds its commands to the tree.
import services.cli.cluster
import services.cli.generate
import services.cli.models  # noqa: F401
from services.cli.tree import EXIT_INTERRUPTED, app, exit_code_of
from shared.errors import CellpipeError
from shared.logs import redact


def main(argv: list[str] | None = None) -> Any:
    """Entry point. Every error of ours becomes one line, its remedy a second, and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what this terminal cannot
    try:
        return app(args=argv, prog_name="cellpipe")
    except CellpipeError as error:
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
