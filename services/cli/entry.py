"""Where the `cellpipe` script starts: quiet under Ctrl-C even while modules are imported."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from services.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
