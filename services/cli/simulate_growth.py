"""What a simulation costs by the number of nodes: `cellpipe simulate --growth`. Only wires.

Each size runs in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from services.simulator.simulation import Simulation
from shared.errors import ConfigError
from shared.local_cluster.processes import ROOT

MAX_S = 4 * 3600.0


def grow(
    sizes: Sequence[int], arguments: Callable[[int], Sequence[str]]
) -> Iterator[dict[str, Any]]:
    """A row a size: nodes, requests, seconds, memory. `arguments` are those of one size.

    Raises `ConfigError` with what a run said that failed.
    """
    for size in sizes:
        ended = subprocess.run(
            [sys.executable, "-m", "services.cli", "simulate", *arguments(size), "--cost"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MAX_S,
            check=False,
            cwd=ROOT,
        )
        if ended.returncode:
            raise ConfigError(f"{size:,} nodes cannot be simulated: {ended.stderr.strip()[-500:]}")
        yield {"nodes": size, **json.loads(ended.stdout)}


def cost(simulation: Simulation) -> dict[str, Any]:
    """Run it; what that took of this process."""
    began_s, before_s = time.monotonic(), time.process_time()
    outcome = simulation.run()
    return {
        "requests": outcome.figures.num_arrived,
        "tokens": outcome.figures.num_tokens,
        "failures": outcome.figures.num_node_failures,
        "lost": outcome.lost,
        "wall_s": round(time.monotonic() - began_s, 2),
        "cpu_s": round(time.process_time() - before_s, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
    }


def parse_sizes(text: str) -> list[int]:
    """Read "1000,10000". Raises `ConfigError` naming the option and the text."""
    parts = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--growth must be numbers of nodes such as 1000,10000, got {text!r}")
    return sorted(int(part) for part in parts)


def growth_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What a person reads."""
    lines = [
        f"{'nodes':>10}{'requests':>10}{'tokens':>12}{'failures':>10}{'lost':>6}"
        f"{'wall':>10}{'CPU':>10}{'memory':>11}{'CPU a token':>13}"
    ]
    return lines + [
        f"{row['nodes']:>10,}{row['requests']:>10,}{row['tokens']:>12,}{row['failures']:>10,}"
        f"{row['lost']:>6,}{row['wall_s']:>8.1f} s{row['cpu_s']:>8.1f} s{row['peak_mb']:>8.0f} MB"
        f"{1e6 * row['cpu_s'] / max(1, row['tokens']):>10.0f} us"
        for row in rows
    ]
