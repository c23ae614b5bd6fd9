"""Random numbers, drawn in blocks: NumPy's cost is that of a call, not of a number.

Each concern has a stream of its own, spawned from one seed, so that another load meets the same
failures and the other way round. Knows nothing of what they are for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np

Concern = Literal["arrivals", "sizes", "turns", "failures", "choices", "loss"]
CONCERNS: tuple[Concern, ...] = ("arrivals", "sizes", "turns", "failures", "choices", "loss")
BLOCK = 1 << 15


def streams(seed: int) -> dict[Concern, np.random.Generator]:
    """A generator a concern. The same seed gives the same ones, on every machine."""
    children = np.random.SeedSequence(seed).spawn(len(CONCERNS))
    return {
        name: np.random.Generator(np.random.PCG64(child))
        for name, child in zip(CONCERNS, children, strict=True)
    }


class Block:
    """Floats of one distribution, handed out singly or as runs."""

    def __init__(self, draw: Callable[[int], np.ndarray], size: int = BLOCK) -> None:
        self._draw = draw
        self._size = size
        self._values: list[float] = []
        self._next = 0

    def one(self) -> float:
        if self._next >= len(self._values):
            self._refill()
        self._next += 1
        return self._values[self._next - 1]

    def run(self, count: int) -> list[float]:
        """`count` of them."""
        if self._next + count > len(self._values):
            self._refill(count)
        first = self._next
        self._next = first + count
        return self._values[first : self._next]

    def _refill(self, at_least: int = 1) -> None:
        self._values = self._draw(max(self._size, at_least)).tolist()
        self._next = 0


def turn_factors(rng: np.random.Generator, variation: float) -> Block:
    """Factors of mean 1 and this coefficient of variation: gamma, which is exponential at 1."""
    if variation == 0.0:
        return Block(np.ones)
    if variation == 1.0:
        return Block(lambda n: rng.standard_exponential(n))
    shape = 1.0 / variation**2
    return Block(lambda n: rng.gamma(shape, 1.0 / shape, n))
