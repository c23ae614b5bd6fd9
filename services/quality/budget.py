"""Chooses types of tensors under a size budget: the least loss that fits. Knows no tensor.

Losses add up, as far as they are small: what is rounded in one tensor and in another are nearly
independent. So the best choice is exact arithmetic over sums, and no more than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Option:
    """One type for a unit, its bytes and what it loses."""

    type_name: str
    num_bytes: int
    loss: float


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that get one type together."""

    name: str
    num_weights: int
    options: tuple[Option, ...]


def choose(units: Sequence[Unit], *, max_bytes: int) -> tuple[Option, ...]:
    """The option of each unit with which the losses add up to the least within `max_bytes`.

    Exact: of all choices so far only those are kept that none beats in both bytes and loss.
    Raises `ConfigError` when even the smallest options are too large.
    """
    smallest = sum(min(option.num_bytes for option in unit.options) for unit in units)
    if smallest > max_bytes:
        bits = 8 * smallest / sum(unit.num_weights for unit in units)
        raise ConfigError(
            f"--max-bits-per-weight asks for {max_bytes} bytes; the smallest types take "
            f"{smallest}, {bits:.3f} bits per weight",
            remedy=f"give at least {bits:.3f}",
        )
    front: list[tuple[int, float, tuple[Option, ...]]] = [(0, 0.0, ())]
    for unit in units:
        sums = sorted(
            (
                (size + option.num_bytes, loss + option.loss, (*chosen, option))
                for size, loss, chosen in front
                for option in unit.options
            ),
            key=lambda choice: choice[:2],
        )
        front = []
        for choice in sums:
            if not front or choice[1] < front[-1][1]:
                front.append(choice)
    fitting = [choice for choice in front if choice[0] <= max_bytes]
    return fitting[-1][2]  # the front falls in loss as it grows in bytes
