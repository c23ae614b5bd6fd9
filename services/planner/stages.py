"""Cuts a model into stages whose slots fit nodes. Pure.

A stage is a run of layers. It has `width` trunk slots, each with a slice of the stage's weights (1:
the weights as they are), and for routed experts that are not kept in the trunk, expert slots. A
slot is what one node holds; any number of nodes may hold copies of it. Embedding and head go with
the first and last layers where they fit, and are cut by vocabulary where no node has room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from services.planner.cost import embedding_bytes, head_bytes, layer_weights
from services.planner.slices import (
    Demand,
    num_heads,
    room_bytes,
    slice_share,
    sliced_sequence_bytes,
)
from services.planner.specs import NodeSpec


class Strategy(StrEnum):
    """How a layer is spread over nodes. All three are pipelines along the layers."""

    PIPELINE = "pipeline"  # whole layers
    TENSOR = "tensor"  # every layer in slices
    EXPERT = "expert"  # trunks, and experts on nodes of their own


@dataclass(frozen=True, slots=True)
class Stage:
    """One run of layers on nodes of one kind, its experts maybe on another.

    Bytes are of one slot: `weight_bytes` of a trunk slot, `sequence_bytes` of one sequence in it.
    `expert_slots` hold `experts_per_slot` experts each (below 1: slices of one), of all layers of
    the stage together.
    """

    first_layer: int
    end_layer: int
    embeds: bool
    has_head: bool
    node: NodeSpec
    width: int
    share: float
    weight_bytes: int
    sequence_bytes: int
    expert_node: NodeSpec | None = None
    expert_slots: int = 0
    experts_per_slot: float = 0.0
    expert_slot_bytes: int = 0

    @property
    def num_layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def num_slots(self) -> int:
        return self.width + self.expert_slots


@dataclass(frozen=True, slots=True)
class Misfit:
    """A part that no node of a kind can hold: what one of its slices needs, and what there is."""

    what: str
    width: int
    node: NodeSpec
    need_bytes: int
    room_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.what} needs {self.need_bytes / 1e6:,.0f} MB of a {self.node.name}, "
            f"which has {self.room_bytes / 1e6:,.0f} MB to give"
        )


@dataclass(frozen=True, slots=True)
class _Unit:
    """An embedding, a layer or a head, on its way into a stage."""

    what: str
    layer: int | None
    weight_bytes: int
    sequence_bytes: int
    max_width: int


@lru_cache(maxsize=1 << 14)
def cut(
    demand: Demand,
    strategy: Strategy,
    node: NodeSpec,
    expert_node: NodeSpec,
    layers: range,
    streams: int,
    *,
    width: int = 1,
    bounds: tuple[tuple[int, int], ...] | None = None,
) -> tuple[Stage, ...] | Misfit:
    """Stages for `layers` (with embedding and head if they are the model's first and last), each
    slot with room for `streams` sequences.

    `width` is that of `Strategy.TENSOR`; a trunk too large for a node is cut as often as it takes
    in `Strategy.EXPERT`. With `bounds` the runs are given, and must fit.
    """
    room = room_bytes(node, demand)
    packer = _Packer(demand, strategy, node, room, streams, width)
    for unit in _units(demand, strategy, layers):
        forced = bounds is not None and unit.layer in {first for first, _ in bounds[1:]}
        if (misfit := packer.add(unit, starts=forced, may_start=bounds is None)) is not None:
            return misfit
    packer.flush()
    if strategy is not Strategy.EXPERT:
        return tuple(packer.stages)
    return _with_experts(demand, packer.stages, expert_node)


def _units(demand: Demand, strategy: Strategy, layers: range) -> list[_Unit]:
    model, bits, d = demand.model, demand.bits, demand.model.hidden_size
    units = []
    rows = model.vocab_size // 16
    if layers.start == 0:
        units.append(_Unit("the embedding", None, embedding_bytes(model, bits), 0, rows))
    for index in layers:
        layer = model.layers[index]
        weights = layer_weights(layer, d, bits)
        size = weights.trunk_bytes if strategy is Strategy.EXPERT else weights.total_bytes
        sequence = sliced_sequence_bytes(layer, demand.context, 1)
        what = f"layer {index}"
        if strategy is Strategy.EXPERT and weights.num_experts:
            what = f"the trunk of layer {index}"
        units.append(_Unit(what, index, size, sequence, num_heads(layer)))
    if layers.stop == model.num_hidden_layers:
        units.append(_Unit("the head", None, head_bytes(model, bits), 0, rows))
    return units


class _Packer:
    """Fills stage after stage."""

    def __init__(
        self,
        demand: Demand,
        strategy: Strategy,
        node: NodeSpec,
        room: int,
        streams: int,
        width: int,
    ) -> None:
        self.stages: list[Stage] = []
        self._demand = demand
        self._strategy = strategy
        self._node = node
        self._room = room
        self._streams = streams
        self._width = width
        self._units: list[_Unit] = []
        self._used = 0  # bytes that they need

    def add(self, unit: _Unit, *, starts: bool, may_start: bool) -> Misfit | None:
        """Put a unit into this stage or the next; None when it is placed."""
        if starts:
            self.flush()
        need = self._need(unit, self._width)
        if self._used + need > self._room and self._units and not may_start:
            whole = self._used + need
            return Misfit(f"a group with {unit.what}", self._width, self._node, whole, self._room)
        if self._used + need > self._room:
            self.flush()
        if self._used + need <= self._room:
            self._units.append(unit)
            self._used += need
            return None
        may_split = unit.layer is None or self._strategy is Strategy.EXPERT
        widest = unit.max_width if may_split else self._width
        for width in range(self._width + 1, widest + 1):
            if self._need(unit, width) <= self._room:
                self._units.append(unit)
                self._close(width)
                return None
        what = f"{unit.what} in {widest} slices" if widest > 1 else unit.what
        return Misfit(what, widest, self._node, self._need(unit, widest), self._room)

    def flush(self) -> None:
        if self._units:
            self._close(self._width)

    def _need(self, unit: _Unit, width: int) -> int:
        return self._weights(unit, width) + self._streams * self._sequence(unit, width)

    def _weights(self, unit: _Unit, width: int) -> int:
        if width == 1:
            return unit.weight_bytes
        if unit.layer is None:
            return -(-unit.weight_bytes // width)
        share = slice_share(self._demand.model.layers[unit.layer], width)
        return math.ceil(unit.weight_bytes * share)

    def _sequence(self, unit: _Unit, width: int) -> int:
        if width == 1 or unit.layer is None:
            return unit.sequence_bytes
        layer = self._demand.model.layers[unit.layer]
        return sliced_sequence_bytes(layer, self._demand.context, width)

    def _close(self, width: int) -> None:
        units, self._units = self._units, []
        self._used = 0
        layers = [unit.layer for unit in units if unit.layer is not None]
        embeds = units[0].what == "the embedding"
        has_head = units[-1].what == "the head"
        before = self.stages[-1].end_layer if self.stages else 0
        first = layers[0] if layers else before
        end = layers[-1] + 1 if layers else before
        weights = sum(self._weights(unit, width) for unit in units)
        whole = sum(unit.weight_bytes for unit in units)
        self.stages.append(
            Stage(
                first, end, embeds, has_head, self._node, width, weights / whole, weights,
                sum(self._sequence(unit, width) for unit in units),
            )
        )  # fmt: skip


def _with_experts(
    demand: Demand, stages: list[Stage], node: NodeSpec
) -> tuple[Stage, ...] | Misfit:
    model = demand.model
    room = room_bytes(node, demand)
    found = []
    for stage in stages:
        kinds = [
            layer_weights(model.layers[index], model.hidden_size, demand.bits)
            for index in range(stage.first_layer, stage.end_layer)
        ]
        number = sum(weights.num_experts for weights in kinds)
        if number == 0:
            found.append(stage)
            continue
        size = max(weights.expert_bytes for weights in kinds)
        each = room // size
        if each >= 1:
            slots = math.ceil(number / each)
            per_slot = number / slots
            slot_bytes = math.ceil(per_slot) * size
        else:
            slices = math.ceil(size / room) if room > 0 else 0
            if slices == 0 or size / slices < size / 64:
                return Misfit("an expert in 64 slices", 64, node, size // 64, room)
            slots, per_slot, slot_bytes = number * slices, 1 / slices, math.ceil(size / slices)
        found.append(
            replace(
                stage,
                expert_node=node,
                expert_slots=slots,
                experts_per_slot=per_slot,
                expert_slot_bytes=slot_bytes,
            )
        )
    return tuple(found)
