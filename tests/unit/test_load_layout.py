"""What a layout asks of workers, and what inspect shows."""

from __future__ import annotations

import pytest

from services.loader.layout import inspect_model, least_groups_that_fit, plan_layout
from services.loader.packed import open_packed
from shared.errors import ConfigError, ModelError
from shared.manifest import Manifest
from shared.topology import WORKER_BASE_BYTES, Wire, even_layout, group_shards
from tests.gguf_files import TinyModel, write_gguf


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("model")
    return open_packed(write_gguf(folder / "m.gguf", TinyModel(layers=5)), folder).manifest


@pytest.mark.parametrize("tied", [True, False])
def test_groups_get_the_shards_that_they_compute_with(tied: bool) -> None:
    layout = even_layout("m@0", 5, 3)

    assert group_shards(layout, 0, tied=tied) == ("embedding", "rope", "layer.0", "layer.1")
    assert group_shards(layout, 1, tied=tied) == ("rope", "layer.2", "layer.3")
    last = ("rope", "layer.4", "embedding", "head") if tied else ("rope", "layer.4", "head")
    assert group_shards(layout, 2, tied=tied) == last


def test_one_group_holds_every_shard_once() -> None:
    shards = group_shards(even_layout("m@0", 2, 1), 0, tied=True)

    assert shards == ("embedding", "rope", "layer.0", "layer.1", "head")


def test_a_plan_adds_up(manifest: Manifest) -> None:
    layout = even_layout(manifest.model_id, 5, 3)

    plans = plan_layout(manifest, layout)

    assert [(p.first_layer, p.end_layer) for p in plans] == [(0, 2), (2, 4), (4, 5)]
    for plan in plans:
        assert plan.shard_bytes == sum(manifest.shard(name).num_bytes for name in plan.shards)
        assert plan.num_chunks == sum(manifest.shard(name).num_chunks for name in plan.shards)
        assert plan.memory_bytes == plan.shard_bytes + WORKER_BASE_BYTES
        assert plan.fits
    assert plans[0].kv_bytes_per_position == 2 * 2 * 2 * 32  # layers, k and v, fp16, kv_dim


def test_a_plan_tells_what_crosses_each_hop(manifest: Manifest) -> None:
    layouts = [even_layout(manifest.model_id, 5, 3, wire=wire) for wire in Wire]

    hops = [[p.hop_bytes_per_position for p in plan_layout(manifest, lay)] for lay in layouts]

    assert manifest.config["hidden_size"] == 64
    assert hops == [[256, 256, 0], [128, 128, 0], [72, 72, 0]]  # the last group sends a token


def test_a_budget_decides_group_by_group(manifest: Manifest) -> None:
    layout = even_layout(manifest.model_id, 5, 3)
    sizes = [plan.memory_bytes for plan in plan_layout(manifest, layout)]

    plans = plan_layout(manifest, layout, budget_bytes=sorted(sizes)[1])

    assert sum(plan.fits for plan in plans) == 2
    assert [plan.fits for plan in plans] == [size <= sorted(sizes)[1] for size in sizes]


def test_the_fewest_groups_that_fit_are_found(manifest: Manifest) -> None:
    layout = even_layout(manifest.model_id, 5, 1)

    def largest(num_groups: int) -> int:
        plans = plan_layout(manifest, even_layout(manifest.model_id, 5, num_groups))
        return max(plan.memory_bytes for plan in plans)

    def fewest(budget_bytes: int) -> int | None:
        return least_groups_that_fit(manifest, layout, budget_bytes=budget_bytes)

    assert largest(2) < largest(1)
    assert fewest(largest(1)) == 1
    assert fewest(largest(1) - 1) == 2
    assert fewest(WORKER_BASE_BYTES) is None


def test_wrong_input_is_refused(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match="--memory must be positive"):
        plan_layout(manifest, even_layout(manifest.model_id, 5, 1), budget_bytes=0)
    with pytest.raises(ModelError, match="other@1"):
        plan_layout(manifest, even_layout("other@1", 5, 1))


def test_inspect_shows_chunks_as_dmas(manifest: Manifest) -> None:
    inspection = inspect_model(manifest)

    assert inspection.config.num_hidden_layers == len(inspection.layers) == 5
    assert inspection.num_bytes == sum(shard.num_bytes for shard in manifest.shards)
    layer = inspection.layers[0]
    assert layer.num_chunks == sum(m.num_chunks for m in layer.matrices) == 7
    q_proj = next(m for m in layer.matrices if m.name == "q_proj")
    assert (q_proj.rows, q_proj.cols, q_proj.chunk_rows, q_proj.kind) == (64, 64, 64, "int4")
    assert q_proj.chunk_bytes * q_proj.num_chunks == q_proj.num_bytes
    norm = next(m for m in layer.matrices if m.name == "input_layernorm")
    assert (norm.num_chunks, norm.chunk_rows, norm.chunk_bytes) == (0, 0, 0)
