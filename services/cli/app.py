"""The entry point of `cellpipe`, and how a command ends."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any

# Each adds its commands to the tree; `--help` shows them in this order.
import services.cli.generate  # isort: skip
import services.cli.chat  # isort: skip
import services.cli.queue  # isort: skip
import services.cli.batch  # isort: skip
import services.cli.models  # isort: skip
import services.cli.model_list  # isort: skip
import services.cli.quantize  # isort: skip
import services.cli.evaluate  # isort: skip
import services.cli.cluster  # isort: skip
import services.cli.gateway  # isort: skip
import services.cli.bench  # isort: skip
import services.cli.bench_cluster  # isort: skip
import services.cli.operate  # isort: skip
import services.cli.chaos  # isort: skip
import services.cli.plan  # isort: skip
import services.cli.calibrate  # isort: skip
import services.cli.simulate  # noqa: F401  # isort: skip
from services.cli.tree import EXIT_FAILED, EXIT_INTERRUPTED, app, exit_code_of
from shared.errors import CellpipeError
from shared.logs import redact

PANELS = {  # of `cellpipe --help`
    "Ask": ("run", "chat", "enqueue", "result", "cancel", "batch"),
    "Serve programs": ("serve", "gateway", "key"),
    "Models": ("models", "pull", "inspect", "load", "quantize", "evaluate"),
    "Cluster": ("worker", "scheduler", "status", "workers", "drain", "dead"),
    "Measure and break": ("bench", "chaos"),
    "Plan": ("plan", "simulate", "calibrate"),
}


def _arrange_help() -> None:
    panels = {name: panel for panel, names in PANELS.items() for name in names}
    for command in app.registered_commands:
        assert command.callback is not None, "every command is a function"
        command.rich_help_panel = panels[command.callback.__name__]
    for group in app.registered_groups:
        assert group.name is not None, "every group is added by name"
        group.rich_help_panel = panels[group.name]


def main(argv: list[str] | None = None) -> Any:
    """Entry point. Every error of ours becomes one line, its remedy a second, and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may say what this terminal cannot
    _arrange_help()
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
        _drop_output()
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        _drop_output()
        print(f"cellpipe: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_FAILED)


def _drop_output() -> None:
    """Let the interpreter's last flush of standard output go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
