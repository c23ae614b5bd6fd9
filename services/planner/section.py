"""A titled table, for terminal and HTML alike. Knows no plan."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table; columns of numbers are flush right. `notes` follow it."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    text_columns: frozenset[int] = field(default_factory=lambda: frozenset({0}))
