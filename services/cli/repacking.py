"""Tells what bringing a model's tensors into the kernel's formats did to them. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from shared.manifest import Repacking


def repacking_rows(repacked: Sequence[Repacking]) -> list[dict[str, Any]]:
    """One object per tensor name and types, for --json."""
    return [asdict(line) for line in repacked]


def repacking_note(repacked: Sequence[Repacking]) -> str:
    """One line: from which types to which, and the largest relative RMS. "" when nothing moved."""
    most: dict[str, float] = {}
    for line in repacked:
        way = f"{line.source_type} to {line.kind}"
        most[way] = max(most.get(way, 0.0), line.relative_rms)
    if not most:
        return ""
    told = ", ".join(f"{way} (relative RMS {share(rms)})" for way, rms in most.items())
    return f"repacked for the kernel: {told}; all else as the file has it"


def repacking_table(repacked: Sequence[Repacking]) -> Table:
    """Every tensor name with its types and error."""
    from rich.table import Table

    table = Table(
        "tensor", "in the file", "in the shards", "relative RMS",
        title="repacked tensors: how far they moved, over all layers",
    )  # fmt: skip
    for line in repacked:
        table.add_row(line.tensor, line.source_type, line.kind, share(line.relative_rms))
    return table


def share(ratio: float) -> str:
    """A ratio in percent with two digits that count: 0.53 %, 0.022 %."""
    return f"{100 * ratio:.2g} %"
