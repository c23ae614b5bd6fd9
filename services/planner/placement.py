"""How a model lies over a pool, as values: what is wished for, slots, their copies, the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.planner.specs import NodeSpec
from services.planner.stages import Stage, Strategy
from services.planner.timing import Seconds, StageStep, Traffic


@dataclass(frozen=True, slots=True)
class Wishes:
    """What is asked of a placement beside the model.

    `concurrency` sequences at a time; None is as many as bring the most tokens. `spares` nodes of
    every slot may fail without a loss of rate. `groups` and `strategy` leave no choice.
    `max_token_s` is the longest time from token to token.
    """

    concurrency: int | None = None
    spares: int = 0
    groups: int | None = None
    strategy: Strategy | None = None
    max_token_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Slot:
    """Weights that one node holds, `number` different ones that are alike.

    `busy_s` is what a token costs one of them on average; `streams` sequences have room in a copy.
    """

    what: str
    node: NodeSpec
    number: int
    weight_bytes: int
    sequence_bytes: int
    streams: float
    busy_s: float


@dataclass(frozen=True, slots=True)
class Copies:
    """A slot, and how many nodes hold each of its number: `active` carry the rate."""

    slot: Slot
    active: int
    spares: int

    @property
    def num_nodes(self) -> int:
        return self.slot.number * (self.active + self.spares)


@dataclass(frozen=True, slots=True)
class Placement:
    """A choice, and what it carries.

    `tokens_per_s` of all sequences together with `streams` in flight at `batch` a step; `token_s`
    is the time from token to token of one of them, `latency` that of a token that waits for nobody.
    Rates are bounds (Denning and Buzen's operational laws): random arrivals stay below them.
    """

    strategy: Strategy
    stages: tuple[Stage, ...]
    batch: int
    steps: tuple[StageStep, ...]
    copies: tuple[Copies, ...]
    tokens_per_s: float
    streams: float
    latency: Seconds
    traffic: Traffic
    bound: str

    @property
    def token_s(self) -> float:
        return self.streams / self.tokens_per_s

    @property
    def num_slots(self) -> int:
        return sum(copies.slot.number for copies in self.copies)

    @property
    def num_nodes(self) -> int:
        return sum(copies.num_nodes for copies in self.copies)
