"""Facts about building a layer group from a manifest and its shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.errors import ModelError, ShardError
from shared.kernel.chunks import aligned_zeros
from shared.kernel.weights import GroupWeights
from shared.manifest import Manifest, TensorKind
from shared.model.backend import pick_backend
from shared.model.forward import ReferenceBackend, ReferenceGroup
from shared.model.layer_group import LayerGroup
from tests.kernel_backends import every_backend, load_group
from tests.tiny_model import TinyModel, tiny_model


@every_backend
def test_a_shard_is_read_once(backend_name: str) -> None:
    tied = tiny_model()

    load_group(tied, backend_name)

    assert set(tied.num_reads) == set(tied.shards)
    assert set(tied.num_reads.values()) == {1}


@every_backend
def test_a_middle_group_reads_only_its_layers_and_the_rope(backend_name: str) -> None:
    other = tiny_model()

    load_group(other, backend_name, 1, 3)

    assert set(other.num_reads) == {"layer.1", "layer.2", "rope"}


def test_a_short_shard_is_refused_by_name() -> None:
    other = tiny_model()
    other.shards["layer.2"] = other.shards["layer.2"][:-1]

    with pytest.raises(ShardError, match=r"layer\.2"):
        load_group(other, "reference")


def with_tensor(model: TinyModel, shard: str, tensor: str, **changes: object) -> TinyModel:
    """The model with one tensor entry of its manifest changed."""
    shards = tuple(
        replace(
            s,
            tensors=tuple(
                replace(t, **changes) if (s.name, t.name) == (shard, tensor) else t  # type: ignore[arg-type]
                for t in s.tensors
            ),
        )
        for s in model.manifest.shards
    )
    manifest = Manifest(model.manifest.model_id, model.manifest.config, shards)
    return TinyModel(model.config, manifest, model.shards)


@pytest.mark.parametrize(
    ("tensor", "changes"),
    [
        ("q_proj", {"rows": 48}),
        ("up_proj", {"chunk_rows": 8}),
        ("down_proj", {"num_bytes": 128}),
        ("k_proj", {"offset": 10**9}),
        ("k_proj", {"offset": 8}),
        ("input_layernorm", {"kind": TensorKind.INT8}),
        ("v_proj", {"kind": TensorKind.F32}),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_tensor(
    tensor: str, changes: dict[str, object]
) -> None:
    broken = with_tensor(tiny_model(), "layer.1", tensor, **changes)

    with pytest.raises(ModelError, match=rf"layer\.1/{tensor}"):
        load_group(broken, "reference")


def test_layers_outside_the_model_are_refused() -> None:
    model = tiny_model()

    with pytest.raises(ModelError, match=r"3\.\.5"):
        LayerGroup.load(
            model.config,
            model.manifest,
            3,
            5,
            model.read_shard,
            first=False,
            last=True,
            backend=pick_backend("reference"),
        )


def test_an_aligned_shard_is_viewed_and_not_copied() -> None:
    other = tiny_model()
    buffers = {}
    for name, raw in other.shards.items():
        buffers[name] = aligned_zeros(len(raw))
        buffers[name][:] = np.frombuffer(raw, np.uint8)
    bound: list[GroupWeights] = []

    class Recording(ReferenceBackend):
        def bind(self, weights: GroupWeights) -> ReferenceGroup:
            bound.append(weights)
            return super().bind(weights)

    LayerGroup.load(
        other.config,
        other.manifest,
        0,
        4,
        buffers.__getitem__,
        first=True,
        last=True,
        backend=Recording(),
    )

    assert np.shares_memory(bound[0].layers[2].down.data, buffers["layer.2"])
    assert bound[0].embedding is not None
    assert np.shares_memory(bound[0].embedding.data, buffers["embedding"])
