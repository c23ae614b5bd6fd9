"""What a model, a machine, a network and the servers are, as values. Knows no file and no formula.

Names of model sizes are Hugging Face's. Bytes, seconds, watts, and multiply-adds (one of which is
two of a data sheet's operations). Layers, and specs that have a name, are compared by identity,
which makes them cheap keys: a library holds one of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GroupedQueryAttention:
    """Softmax attention; multi-head where both numbers of heads are the same.

    `qk_norm` has a norm of head_dim for queries and for keys (Qwen3).
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    qk_norm: bool = False


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA: keys and values come from one latent a position (DeepSeek-V2, 2.1).

    `output_gate` multiplies the heads' output with a full-rank gate before the output projection.
    """

    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool = False


@dataclass(frozen=True, slots=True)
class DeltaAttention:
    """KDA: linear attention whose memory is a matrix a head (Kimi Linear, arXiv 2510.26692).

    `gate_rank` is that of the output gate; 0 is full rank. `decay_rank` is that of the decay.
    """

    num_heads: int
    head_dim: int
    conv_kernel_size: int
    decay_rank: int
    gate_rank: int = 0


Attention = GroupedQueryAttention | LatentAttention | DeltaAttention


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """Gate, up and down."""

    intermediate_size: int


@dataclass(frozen=True, slots=True)
class ExpertMlp:
    """A router, routed experts and shared ones, each with gate, up and down.

    With `latent_size` the routed experts work on a projection of the hidden state to so many
    values; the shared ones always on the hidden state itself. 0 is without. `routing_bias` is a
    number an expert that keeps their loads even (DeepSeek-V3, 2.1.2).
    """

    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0  # of one shared expert; 0 is as the routed ones
    latent_size: int = 0
    routing_bias: bool = False


Mlp = DenseMlp | ExpertMlp


@dataclass(frozen=True, slots=True, eq=False)
class LayerSpec:
    """Alike layers of a model are one object."""

    attention: Attention
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Published:
    """What its makers say of a model, and by how much their rounding may be off, as a share."""

    total_parameters: float
    active_parameters: float
    total_tolerance: float
    active_tolerance: float


@dataclass(frozen=True, slots=True, eq=False)
class ModelSpec:
    """A decoder. `layers` in their order.

    `residual_block_layers` is the block size of attention residuals (Kimi K3), whose hops carry
    the outputs of all earlier blocks; 0 is without. `embedding_bits` is what embedding and head are
    kept in where that differs from the layers; 0 is no difference. `sources` says where each number
    is from, `unsure` which are doubtful and why.
    """

    name: str
    title: str
    vocab_size: int
    hidden_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    published: Published
    residual_block_layers: int = 0
    embedding_bits: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)
    unsure: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class NodeSpec:
    """One kind of machine, or of worker on a machine.

    `memory_bytes` is what programs can use; a worker takes `reserved_bytes` of it for itself.
    `bandwidth_share` and `compute_share` are the parts of the memory's and the units' peak that the
    kernel reaches. A worker's turn costs `turn_s` beside the kernel and each step in it `step_s`.
    `local_store_bytes` is 0 where the hardware has caches. `host_cores` is the number of cores that
    all nodes of this kind share because they are processes of one machine, 0 if each is a machine
    of its own; `hop_cpu_s` is then what broker and clients take of those cores for a message, and
    `request_cpu_s` what a request takes of them beside its groups. A slice of a prompt computes
    `prompt_speedup` times as fast as a decode step of as many rows.
    """

    name: str
    title: str
    memory_bytes: int
    reserved_bytes: int
    memory_bytes_per_s: float
    multiply_adds_per_s: float
    bandwidth_share: float
    compute_share: float
    network_bytes_per_s: float
    watts: float
    failures_per_hour: float
    repair_hours: float
    turn_s: float
    step_s: float
    local_store_bytes: int = 0
    host_cores: int = 0
    hop_cpu_s: float = 0.0
    request_cpu_s: float = 0.0
    prompt_speedup: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)
    unsure: Mapping[str, str] = field(default_factory=dict)

    @property
    def weight_bytes_per_s(self) -> float:
        """Weights that the kernel streams, bytes per second."""
        return self.memory_bytes_per_s * self.bandwidth_share

    @property
    def kernel_multiply_adds_per_s(self) -> float:
        return self.multiply_adds_per_s * self.compute_share


@dataclass(frozen=True, slots=True)
class NetworkTier:
    """A level of switches, from the inside out.

    `size` is how many units of the tier below (nodes, for the first) one switch joins; 0 is any
    number. `latency_s` is one way between two nodes that meet here, `uplink_bytes_per_s` what one
    such switch can send upwards.
    """

    name: str
    size: int
    latency_s: float
    uplink_bytes_per_s: float


@dataclass(frozen=True, slots=True, eq=False)
class NetworkSpec:
    """`loss` is the share of packets that is lost, each costing `retransmit_s`."""

    name: str
    title: str
    tiers: tuple[NetworkTier, ...]
    loss: float
    retransmit_s: float
    sources: Mapping[str, str] = field(default_factory=dict)
    unsure: Mapping[str, str] = field(default_factory=dict)

    @property
    def rack_size(self) -> int:
        """Nodes under one switch of the first tier; 0 is any number."""
        return self.tiers[0].size


@dataclass(frozen=True, slots=True, eq=False)
class ServerSpec:
    """What one node of RabbitMQ and one shard of Redis carry.

    `broker_hop_s` is from publish to delivery without the wire, `commit_s` what a token waits for
    its commit, `admission_s` what a request waits for its scheduler. No more than `max_utilisation`
    of a rate is planned with.
    """

    name: str
    title: str
    broker_messages_per_s: float
    broker_bytes_per_s: float
    broker_hop_s: float
    broker_connections: int
    broker_max_nodes: int
    redis_operations_per_s: float
    redis_bytes_per_s: float
    redis_round_trip_s: float
    commit_s: float
    admission_s: float
    redis_memory_bytes: int
    redis_max_shards: int
    max_utilisation: float
    sources: Mapping[str, str] = field(default_factory=dict)
    unsure: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NodeCount:
    """So many nodes of one kind."""

    node: NodeSpec
    count: int


@dataclass(frozen=True, slots=True)
class Pool:
    """All machines there are, what joins them, and the servers they meet at."""

    name: str
    nodes: tuple[NodeCount, ...]
    network: NetworkSpec
    servers: ServerSpec

    @property
    def num_nodes(self) -> int:
        return sum(kind.count for kind in self.nodes)

    @property
    def watts(self) -> float:
        return sum(kind.count * kind.node.watts for kind in self.nodes)

    @property
    def failures_per_hour(self) -> float:
        """Expected failures of all nodes together."""
        return sum(kind.count * kind.node.failures_per_hour for kind in self.nodes)

    @property
    def specs(self) -> tuple[NodeSpec | NetworkSpec | ServerSpec, ...]:
        """Everything that it is made of."""
        return (*(kind.node for kind in self.nodes), self.network, self.servers)
