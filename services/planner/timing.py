"""How long a step of a batch takes in a stage, and what it sends. Pure.

With double buffering the next chunk arrives while this one is computed: a product takes the longer
of both, and what streaming takes beyond computing is its DMA part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from services.planner.cost import (
    FRAME_BYTES,
    attention_multiply_adds,
    expert_message_bytes,
    expert_multiply_adds,
    experts_touched,
    head_bytes,
    head_multiply_adds,
    hop_bytes,
    layer_weights,
    trunk_multiply_adds,
)
from services.planner.network import Link
from services.planner.slices import Demand, sliced_sequence_bytes
from services.planner.specs import ModelSpec, NetworkSpec, NodeSpec, ServerSpec
from services.planner.stages import Stage
from shared.topology import Wire
from shared.wire import row_bytes

MAX_DIRECT_WIDTH = 4  # 12 messages; 16 slices would send 240 in place of 30
CANDIDATE_BYTES = 64 * 8  # of a vocabulary slice: its best tokens and their logits


@dataclass(frozen=True, slots=True)
class Seconds:
    """A step's time by where it goes; `worker` is what processes take beside the kernel."""

    dma: float = 0.0
    compute: float = 0.0
    network: float = 0.0
    worker: float = 0.0
    queue: float = 0.0

    @property
    def total(self) -> float:
        return self.dma + self.compute + self.network + self.worker + self.queue

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(
            self.dma + other.dma,
            self.compute + other.compute,
            self.network + other.network,
            self.worker + other.worker,
            self.queue + other.queue,
        )


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages through the broker and their bytes, for one step."""

    messages: float = 0.0
    num_bytes: float = 0.0

    def plus(self, other: Traffic) -> Traffic:
        return Traffic(self.messages + other.messages, self.num_bytes + other.num_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class StageStep:
    """A step of `batch` tokens in one stage.

    `latency` is what the tokens wait, the hop to the next stage included. `trunk_busy_s` and
    `expert_busy_s` are what one trunk slot and, on average, one expert slot is occupied by it.
    """

    batch: float
    latency: Seconds
    traffic: Traffic
    trunk_busy_s: float
    expert_busy_s: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What lies between nodes: the network, the servers, the wire, and how far messages go."""

    network: NetworkSpec
    servers: ServerSpec
    wire: Wire

    def link(self, node: NodeSpec, neighbours: int) -> Link:
        return Link(self.network, self.servers, node.network_bytes_per_s, neighbours)


def kernel_seconds(node: NodeSpec, num_bytes: float, multiply_adds: float) -> Seconds:
    """Streaming so many bytes under so many multiply-adds."""
    stream_s = num_bytes / node.weight_bytes_per_s
    compute_s = multiply_adds / node.kernel_multiply_adds_per_s
    return Seconds(dma=max(0.0, stream_s - compute_s), compute=compute_s)


def all_reduce(width: int, num_bytes: float, link: Link) -> tuple[float, Traffic]:
    """Seconds and traffic until `width` nodes have the sum of their vectors: each to each where
    they are few, else through one of them, in twice the time and far fewer messages."""
    if width == 1:
        return 0.0, Traffic()
    others = width - 1
    each_s = link.message_s(num_bytes) + (others - 1) * link.send_s(num_bytes)
    if width <= MAX_DIRECT_WIDTH:
        return each_s, Traffic(width * others, width * others * num_bytes)
    return 2 * each_s, Traffic(2 * others, 2 * others * num_bytes)


def busiest_load(num_tasks: float, num_slots: int) -> float:
    """Tasks of the fullest of so many slots when tasks choose at random.

    The bound of Raab and Steger, Balls into Bins (RANDOM 1998): mean + sqrt(2 mean ln slots).
    """
    if num_slots <= 1:
        return num_tasks
    mean = num_tasks / num_slots
    return min(num_tasks, max(1.0, mean + math.sqrt(2 * mean * math.log(num_slots))))


@cache
def stage_step(
    demand: Demand,
    around: Surroundings,
    stage: Stage,
    batch: float,
    context: int,
    is_prompt: bool = False,
) -> StageStep:
    """A step of `batch` tokens, each at position `context`: one of each sequence, or a slice of one
    prompt, which travels as one message and of which the head sees one row."""
    model = demand.model
    node = stage.node
    num_messages = 1 if is_prompt else batch
    own = _trunk_kernel(demand, stage, batch, context, head_rows=num_messages)
    if is_prompt:
        own = Seconds(dma=own.dma, compute=own.compute / node.prompt_speedup)
    worker = Seconds(worker=node.turn_s + num_messages * node.step_s)
    latency = own.plus(worker)
    link = around.link(node, stage.num_slots)
    traffic = Traffic()
    sent_bytes = batch * hop_bytes(model, stage.end_layer, around.wire)
    if stage.width > 1:
        seconds, slices = _slices(model, around, stage, link, batch)
        latency = latency.plus(Seconds(network=seconds))
        traffic = traffic.plus(slices)
        sent_bytes += slices.num_bytes / stage.width
    expert_busy_s = 0.0
    if stage.expert_node is not None:
        waited, scattered, expert_busy_s = _experts(demand, around, stage, link, batch)
        latency = latency.plus(waited)
        traffic = traffic.plus(scattered)
        sent_bytes += scattered.num_bytes / 2 / stage.width
    message = hop_bytes(model, stage.end_layer, around.wire)
    near = around.link(node, 2)
    moved = batch * message / num_messages
    # Each sequence travels in a message of its own, one behind the other.
    hop_s = near.message_s(moved) + (num_messages - 1) * near.send_s(moved)
    if stage.has_head:
        hop_s += around.servers.commit_s
    latency = latency.plus(Seconds(network=hop_s))
    traffic = traffic.plus(Traffic(num_messages, batch * message))
    busy_s = max(own.total + worker.total, sent_bytes / node.network_bytes_per_s)
    return StageStep(batch, latency, traffic, busy_s, expert_busy_s)


def _trunk_kernel(
    demand: Demand, stage: Stage, batch: float, context: int, *, head_rows: float
) -> Seconds:
    """What one trunk slot computes. Experts that it keeps are read as far as they are chosen."""
    model, bits, d = demand.model, demand.bits, demand.model.hidden_size
    num_bytes = read = work = 0.0
    for index in range(stage.first_layer, stage.end_layer):
        layer = model.layers[index]
        weights = layer_weights(layer, d, bits)
        num_bytes += weights.trunk_bytes
        read += sliced_sequence_bytes(layer, context, stage.width)
        work += trunk_multiply_adds(layer, d) + attention_multiply_adds(layer, context)
        if weights.num_experts and stage.expert_node is None:
            chosen = weights.num_experts_per_token
            num_bytes += weights.expert_bytes * experts_touched(weights.num_experts, chosen, batch)
            work += chosen * expert_multiply_adds(layer, d)
    if stage.has_head:
        num_bytes += head_bytes(model, bits)
        work += head_multiply_adds(model) * head_rows / batch
    moved = num_bytes * stage.share + batch * read
    return kernel_seconds(stage.node, moved, batch * work * stage.share)


def _slices(
    model: ModelSpec, around: Surroundings, stage: Stage, link: Link, batch: float
) -> tuple[float, Traffic]:
    """Two sums a layer, after attention and after the MLP; one exchange for embedding and head."""
    vector = batch * (FRAME_BYTES + row_bytes(around.wire, model.hidden_size))
    seconds, traffic = all_reduce(stage.width, vector, link)
    times = 2 * stage.num_layers
    total_s, total = times * seconds, Traffic(times * traffic.messages, times * traffic.num_bytes)
    if stage.has_head:
        answer = batch * (FRAME_BYTES + CANDIDATE_BYTES)
        total_s += link.message_s(vector) + link.message_s(answer)
        others = stage.width - 1
        total = total.plus(Traffic(2 * others, others * (vector + answer)))
    return total_s, total


def _experts(
    demand: Demand, around: Surroundings, stage: Stage, link: Link, batch: float
) -> tuple[Seconds, Traffic, float]:
    """Vectors go to the nodes of their experts and come back, each layer waits for the last."""
    model, d = demand.model, demand.model.hidden_size
    node = stage.expert_node
    assert node is not None, "the caller looked"
    waited, traffic, busy_s = Seconds(), Traffic(), 0.0
    with_experts = [
        layer for layer in model.layers[stage.first_layer : stage.end_layer]
        if layer_weights(layer, d, demand.bits).num_experts
    ]  # fmt: skip
    slots = stage.expert_slots / len(with_experts)  # of one layer, about
    slices = max(1.0, 1.0 / stage.experts_per_slot)
    for layer in with_experts:
        weights = layer_weights(layer, d, demand.bits)
        tasks = batch * weights.num_experts_per_token * slices
        used = experts_touched(max(1, round(slots)), 1, tasks)  # different slots
        per_slot = busiest_load(tasks, max(1, round(slots)))
        share = 1.0 / slices
        work = expert_multiply_adds(layer, d) * share
        size = weights.expert_bytes * share
        # Of the tokens in the fullest slot, those with the same expert share its reading.
        distinct = experts_touched(max(1, math.ceil(stage.experts_per_slot)), 1, per_slot)
        own = kernel_seconds(node, distinct * size, per_slot * work)
        own = own.plus(Seconds(worker=node.turn_s + per_slot * node.step_s))
        vector = expert_message_bytes(layer, d, around.wire)
        out_s = link.message_s(vector * per_slot) + max(
            0.0, link.send_s(vector * (tasks - per_slot))
        )
        waited = waited.plus(own).plus(Seconds(network=2 * out_s))
        messages = 2 * used
        moved = 2 * tasks * vector
        traffic = traffic.plus(Traffic(messages, moved))
        mean = tasks / slots
        mean_kernel = kernel_seconds(node, min(mean, distinct) * size, mean * work).total
        mean_s = mean_kernel + min(1.0, mean) * node.turn_s + mean * node.step_s
        busy_s += max(mean_s, mean * vector / node.network_bytes_per_s)
    # `slots` slots of each layer were busy so long: all of them together, shared by all slots.
    return waited, traffic, busy_s * slots / stage.expert_slots
