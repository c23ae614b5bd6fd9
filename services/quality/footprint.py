"""What a packed model's weights take: bytes, bits, chunks, and how much one worker holds.

Computes from the manifest; reads no weight.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shared.manifest import Manifest, ShardKind, TensorKind
from shared.topology import WORKER_BASE_BYTES

SMALL_WORKER_BYTES = 256 << 20  # the memory of the smallest machine that is planned for


@dataclass(frozen=True, slots=True)
class KindFootprint:
    """The tensors of one kind: int4, int8 or f32 (norms)."""

    kind: str
    num_weights: int
    num_bytes: int
    num_chunks: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights


@dataclass(frozen=True, slots=True)
class Footprint:
    """All weights of a model. The tables of rope and the tokenizer are no weights.

    `layers_in_256_mib` is how many layers, the largest ones, a worker of 256 MiB holds beside what
    its process takes.
    """

    num_parameters: int
    num_bytes: int
    num_chunks: int
    kinds: tuple[KindFootprint, ...]
    num_layers: int
    largest_layer_bytes: int
    layers_in_256_mib: int

    @property
    def bytes_per_parameter(self) -> float:
        return self.num_bytes / self.num_parameters

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes_per_parameter


def footprint_of(manifest: Manifest) -> Footprint:
    """Sums over the manifest's tensors."""
    sums: defaultdict[TensorKind, list[int]] = defaultdict(lambda: [0, 0, 0])
    for shard in manifest.shards:
        if shard.kind in (ShardKind.ROPE, ShardKind.TOKENIZER):
            continue
        for tensor in shard.tensors:
            total = sums[tensor.kind]
            total[0] += tensor.rows * tensor.cols
            total[1] += tensor.num_bytes
            total[2] += tensor.num_chunks
    kinds = tuple(KindFootprint(kind.value, *sums[kind]) for kind in TensorKind if kind in sums)
    layers = [shard.num_bytes for shard in manifest.shards if shard.kind is ShardKind.LAYER]
    largest = max(layers)
    return Footprint(
        num_parameters=sum(kind.num_weights for kind in kinds),
        num_bytes=sum(kind.num_bytes for kind in kinds),
        num_chunks=sum(kind.num_chunks for kind in kinds),
        kinds=kinds,
        num_layers=len(layers),
        largest_layer_bytes=largest,
        layers_in_256_mib=min(len(layers), (SMALL_WORKER_BYTES - WORKER_BASE_BYTES) // largest),
    )
