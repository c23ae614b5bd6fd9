"""Turns tables into specs, strictly. Knows no file but the table it is given."""

from __future__ import annotations

from collections.abc import Mapping

from services.planner.specs import (
    Attention,
    DeltaAttention,
    DenseMlp,
    ExpertMlp,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    Mlp,
    ModelSpec,
    NetworkSpec,
    NetworkTier,
    NodeSpec,
    Published,
    ServerSpec,
)
from services.planner.toml_table import Table

MAX_LAYERS = 10_000


def read_model(name: str, table: Table) -> ModelSpec:
    """A model. Raises `ConfigError` naming file, field and value."""
    attentions = {key: _read_attention(kind) for key, kind in table.table("attention").items()}
    mlps = {key: _read_mlp(kind) for key, kind in table.table("mlp").items()}
    layers: list[LayerSpec] = []
    known: dict[str, LayerSpec] = {}
    for run in table.tables("layers"):
        pattern = [_layer(run, text, known, attentions, mlps) for text in run.texts("of")]
        layers += pattern * run.whole("times", 1)
        run.done()
        if len(layers) > MAX_LAYERS:
            raise table.error("layers", f"must be at most {MAX_LAYERS}, got {len(layers)}")
    hidden_size = table.whole("hidden_size", least=32)
    if hidden_size % 32:
        raise table.error("hidden_size", f"must be a multiple of 32, got {hidden_size}")
    published = table.table("published")
    spec = ModelSpec(
        name=name,
        title=table.text("title", name),
        vocab_size=table.whole("vocab_size"),
        hidden_size=hidden_size,
        tie_word_embeddings=table.flag("tie_word_embeddings", default=False),
        max_position_embeddings=table.whole("max_position_embeddings"),
        layers=tuple(layers),
        published=Published(
            published.positive("total_parameters"),
            published.positive("active_parameters"),
            published.number("total_tolerance", 0.01, most=1.0),
            published.number("active_tolerance", 0.02, most=1.0),
        ),
        residual_block_layers=table.whole("residual_block_layers", 0, least=0),
        embedding_bits=table.whole("embedding_bits", 0, least=0),
        sources=table.notes("sources"),
        unsure=table.notes("unsure"),
    )
    if spec.embedding_bits not in (0, 4, 8, 16):
        raise table.error("embedding_bits", f"must be 4, 8 or 16, got {spec.embedding_bits}")
    published.done()
    table.done()
    return spec


def _layer(
    run: Table,
    text: str,
    known: dict[str, LayerSpec],
    attentions: Mapping[str, Attention],
    mlps: Mapping[str, Mlp],
) -> LayerSpec:
    attention, plus, mlp = text.partition("+")
    if not plus or attention not in attentions or mlp not in mlps:
        raise run.error(
            "of",
            f"must name an attention and an mlp of this file, as in "
            f"{next(iter(attentions))}+{next(iter(mlps))}, got {text!r:.80}",
        )
    return known.setdefault(text, LayerSpec(attentions[attention], mlps[mlp]))


def _read_attention(table: Table) -> Attention:
    kind = table.text("kind")
    spec: Attention
    if kind == "gqa":
        spec = GroupedQueryAttention(
            table.whole("num_attention_heads"),
            table.whole("num_key_value_heads"),
            table.whole("head_dim"),
            table.flag("qk_norm", default=False),
        )
        if spec.num_attention_heads % spec.num_key_value_heads:
            raise table.error(
                "num_attention_heads",
                f"must be a multiple of num_key_value_heads {spec.num_key_value_heads}, "
                f"got {spec.num_attention_heads}",
            )
    elif kind == "mla":
        spec = LatentAttention(
            table.whole("num_attention_heads"),
            table.whole("q_lora_rank"),
            table.whole("kv_lora_rank"),
            table.whole("qk_nope_head_dim"),
            table.whole("qk_rope_head_dim"),
            table.whole("v_head_dim"),
            table.flag("output_gate", default=False),
        )
    elif kind == "kda":
        spec = DeltaAttention(
            table.whole("num_heads"),
            table.whole("head_dim"),
            table.whole("conv_kernel_size", 4),
            table.whole("decay_rank"),
            table.whole("gate_rank", 0, least=0),
        )
    else:
        raise table.error("kind", f"must be gqa, mla or kda, got {kind!r:.80}")
    table.done()
    return spec


def _read_mlp(table: Table) -> Mlp:
    kind = table.text("kind")
    spec: Mlp
    if kind == "dense":
        spec = DenseMlp(table.whole("intermediate_size"))
    elif kind == "experts":
        spec = ExpertMlp(
            table.whole("num_experts"),
            table.whole("num_experts_per_token"),
            table.whole("num_shared_experts", 0, least=0),
            table.whole("moe_intermediate_size"),
            table.whole("shared_intermediate_size", 0, least=0),
            table.whole("latent_size", 0, least=0),
            table.flag("routing_bias", default=False),
        )
        if spec.num_experts_per_token > spec.num_experts:
            raise table.error(
                "num_experts_per_token",
                f"must be at most num_experts {spec.num_experts}, got {spec.num_experts_per_token}",
            )
    else:
        raise table.error("kind", f"must be dense or experts, got {kind!r:.80}")
    table.done()
    return spec


def read_node(name: str, table: Table) -> NodeSpec:
    """One entry of [hardware]. Raises `ConfigError` naming file, field and value."""
    spec = NodeSpec(
        name=name,
        title=table.text("title", name),
        memory_bytes=table.whole("memory_bytes"),
        reserved_bytes=table.whole("reserved_bytes", 90_000_000, least=0),
        memory_bytes_per_s=table.positive("memory_bytes_per_s"),
        multiply_adds_per_s=table.positive("multiply_adds_per_s"),
        bandwidth_share=table.positive("bandwidth_share", 0.6, most=1.0),
        compute_share=table.positive("compute_share", 0.5, most=1.0),
        network_bytes_per_s=table.positive("network_bytes_per_s"),
        watts=table.number("watts"),
        failures_per_hour=table.number("failures_per_hour", 2e-5, most=3600.0),
        repair_hours=table.number("repair_hours", 24.0, most=1e6),
        turn_s=table.number("turn_s", 0.5e-3),
        step_s=table.number("step_s", 0.1e-3),
        local_store_bytes=table.whole("local_store_bytes", 0, least=0),
        host_cores=table.whole("host_cores", 0, least=0),
        hop_cpu_s=table.number("hop_cpu_s", 0.0),
        request_cpu_s=table.number("request_cpu_s", 0.0),
        prompt_speedup=table.positive("prompt_speedup", 1.0),
        sources=table.notes("sources"),
        unsure=table.notes("unsure"),
    )
    if spec.reserved_bytes >= spec.memory_bytes:
        raise table.error(
            "reserved_bytes", f"must be less than memory_bytes, got {spec.reserved_bytes}"
        )
    table.done()
    return spec


def read_network(name: str, table: Table) -> NetworkSpec:
    """One entry of [network]. Raises `ConfigError` naming file, field and value."""
    tiers = []
    rows = table.tables("tiers")
    for index, row in enumerate(rows):
        tier = NetworkTier(
            row.text("name"),
            row.whole("size", 0, least=0),
            row.number("latency_s"),
            row.positive("uplink_bytes_per_s"),
        )
        if (tier.size == 0) != (index == len(rows) - 1):
            raise row.error("size", "must be 0 (any number) for the last tier, and for no other")
        row.done()
        tiers.append(tier)
    spec = NetworkSpec(
        name=name,
        title=table.text("title", name),
        tiers=tuple(tiers),
        loss=table.number("loss", 0.0, most=0.5),
        retransmit_s=table.number("retransmit_s", 0.2),
        sources=table.notes("sources"),
        unsure=table.notes("unsure"),
    )
    table.done()
    return spec


def read_servers(name: str, table: Table) -> ServerSpec:
    """One entry of [servers]. Raises `ConfigError` naming file, field and value."""
    spec = ServerSpec(
        name=name,
        title=table.text("title", name),
        broker_messages_per_s=table.positive("broker_messages_per_s"),
        broker_bytes_per_s=table.positive("broker_bytes_per_s"),
        broker_hop_s=table.number("broker_hop_s"),
        broker_connections=table.whole("broker_connections", 50_000),
        broker_max_nodes=table.whole("broker_max_nodes", 7),
        redis_operations_per_s=table.positive("redis_operations_per_s"),
        redis_bytes_per_s=table.positive("redis_bytes_per_s"),
        redis_round_trip_s=table.number("redis_round_trip_s"),
        commit_s=table.number("commit_s", 0.0),
        admission_s=table.number("admission_s", 0.0),
        redis_memory_bytes=table.whole("redis_memory_bytes"),
        redis_max_shards=table.whole("redis_max_shards", 1000),
        max_utilisation=table.positive("max_utilisation", 0.6, most=1.0),
        sources=table.notes("sources"),
        unsure=table.notes("unsure"),
    )
    table.done()
    return spec
