"""What a layout asks of workers, and what a packed model consists of. Computes; draws nothing."""

from __future__ import annotations

from dataclasses import dataclass

from shared.errors import ConfigError, ModelError
from shared.kernel.chunks import chunk_bytes
from shared.manifest import Manifest, Repacking, TensorEntry
from shared.model.config import ModelConfig
from shared.topology import WORKER_BASE_BYTES, Layout, even_layout, group_shards
from shared.wire import row_bytes


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What one layer group takes: layers first..end-1, its shards, and the memory of a worker.

    To the next group it sends `hop_bytes_per_position` of hidden states; the last one sends tokens.
    """

    group: int
    first_layer: int
    end_layer: int
    shards: tuple[str, ...]
    shard_bytes: int
    num_chunks: int
    kv_bytes_per_position: int
    hop_bytes_per_position: int
    memory_bytes: int
    budget_bytes: int | None

    @property
    def fits(self) -> bool:
        """Whether a worker with the budget can hold the group; true when no budget was given."""
        return self.budget_bytes is None or self.memory_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """One tensor of a shard. A chunk is `chunk_rows` rows, `chunk_bytes` bytes: one DMA."""

    name: str
    kind: str
    rows: int
    cols: int
    num_bytes: int
    num_chunks: int
    chunk_rows: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard: its bytes, and its chunks, which is the number of DMAs that read it."""

    name: str
    num_bytes: int
    num_chunks: int
    num_segments: int
    matrices: tuple[MatrixPlan, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `cellpipe inspect` shows of a packed model."""

    model_id: str
    source: str
    config: ModelConfig
    num_bytes: int
    num_chunks: int
    shards: tuple[ShardPlan, ...]
    repacked: tuple[Repacking, ...]

    @property
    def layers(self) -> tuple[ShardPlan, ...]:
        return tuple(s for s in self.shards if s.name.startswith("layer."))


def plan_layout(
    manifest: Manifest,
    layout: Layout,
    *,
    budget_bytes: int | None = None,
    base_bytes: int = WORKER_BASE_BYTES,
) -> tuple[GroupPlan, ...]:
    """One plan per group of a layout.

    `memory_bytes` is the group's shards and `base_bytes`; KV comes on top, by position. Raises
    `ConfigError` for a budget that is not positive and `ModelError` for a layout of another model.
    """
    if budget_bytes is not None and budget_bytes <= 0:
        raise ConfigError(f"--memory must be positive, got {budget_bytes} bytes")
    if layout.model_id != manifest.model_id:
        raise ModelError(f"layout is of {layout.model_id}, the manifest of {manifest.model_id}")
    config = ModelConfig.from_dict(manifest.config)
    hop_bytes = row_bytes(layout.wire, config.hidden_size)
    plans: list[GroupPlan] = []
    for group, (first, end) in enumerate(layout.bounds):
        names = group_shards(layout, group, tied=config.tie_word_embeddings)
        shards = [manifest.shard(name) for name in names]
        shard_bytes = sum(shard.num_bytes for shard in shards)
        plans.append(
            GroupPlan(
                group=group,
                first_layer=first,
                end_layer=end,
                shards=names,
                shard_bytes=shard_bytes,
                num_chunks=sum(shard.num_chunks for shard in shards),
                kv_bytes_per_position=(end - first) * config.kv_row_bytes_per_layer,
                hop_bytes_per_position=0 if group == layout.last_group else hop_bytes,
                memory_bytes=shard_bytes + base_bytes,
                budget_bytes=budget_bytes,
            )
        )
    return tuple(plans)


def least_groups_that_fit(
    manifest: Manifest, layout: Layout, *, budget_bytes: int, base_bytes: int = WORKER_BASE_BYTES
) -> int | None:
    """How few even groups, of this layout's kind, all fit a worker; None when no number does."""
    num_layers = layout.bounds[-1][1]
    for num_groups in range(1, num_layers + 1):
        cut = even_layout(layout.model_id, num_layers, num_groups, layout.queue_type, layout.wire)
        plans = plan_layout(manifest, cut, budget_bytes=budget_bytes, base_bytes=base_bytes)
        if all(plan.fits for plan in plans):
            return num_groups
    return None


def inspect_model(manifest: Manifest) -> Inspection:
    """Config, shards and chunks of a packed model."""
    shards = tuple(
        ShardPlan(
            name=shard.name,
            num_bytes=shard.num_bytes,
            num_chunks=shard.num_chunks,
            num_segments=len(shard.segments),
            matrices=tuple(_matrix_plan(tensor) for tensor in shard.tensors),
        )
        for shard in manifest.shards
    )
    return Inspection(
        model_id=manifest.model_id,
        source=manifest.source,
        config=ModelConfig.from_dict(manifest.config),
        num_bytes=sum(shard.num_bytes for shard in shards),
        num_chunks=sum(shard.num_chunks for shard in shards),
        shards=shards,
        repacked=manifest.repacked,
    )


def _matrix_plan(tensor: TensorEntry) -> MatrixPlan:
    # All chunks but the last have one size; a matrix of one chunk is that chunk.
    whole = min(tensor.chunk_rows, tensor.rows)
    return MatrixPlan(
        name=tensor.name,
        kind=tensor.kind.value,
        rows=tensor.rows,
        cols=tensor.cols,
        num_bytes=tensor.num_bytes,
        num_chunks=tensor.num_chunks,
        chunk_rows=whole,
        chunk_bytes=chunk_bytes(tensor.kind.value, tensor.cols, whole) if whole else 0,
    )
