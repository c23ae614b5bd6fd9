"""Loading into a store (in this process): resumable, idempotent, and never half seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.loader.packed import PackedModel, open_packed
from services.loader.upload import load_model
from shared.errors import ModelError, ShardError, StoreUnavailable
from shared.store.connection import connect
from shared.store.shards import ShardStore
from shared.topology import Layout, even_layout
from tests.gguf_files import write_gguf


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = tmp_path_factory.mktemp("model")
    return open_packed(write_gguf(folder / "m.gguf"), folder)


@pytest.fixture
def store() -> ShardStore:
    return ShardStore(connect("memory://").weights)


def layout_of(packed: PackedModel, num_groups: int = 2) -> Layout:
    return even_layout(packed.manifest.model_id, 2, num_groups)


class FailingStore(ShardStore):
    """A store that goes away after so many segments."""

    num_left = 3

    def put_segment(
        self, model_id: str, shard_name: str, index: int, body: bytes | memoryview
    ) -> None:
        if self.num_left == 0:
            raise StoreUnavailable("gone")
        self.num_left -= 1
        super().put_segment(model_id, shard_name, index, body)


def test_what_was_loaded_is_read_back_bit_for_bit(packed: PackedModel, store: ShardStore) -> None:
    report = load_model(packed, store, layout_of(packed))

    manifest = store.get_manifest(packed.manifest.model_id)
    assert manifest == packed.manifest
    for shard in manifest.shards:
        assert (
            store.read_shard(manifest, shard.name).tobytes()
            == packed.read_shard(shard.name).tobytes()
        )
    assert store.active_layout() == layout_of(packed)
    assert report.num_sent == report.num_segments
    assert report.sent_bytes == report.total_bytes == sum(s.num_bytes for s in manifest.shards)


def test_a_second_load_sends_nothing(packed: PackedModel, store: ShardStore) -> None:
    load_model(packed, store, layout_of(packed))

    report = load_model(packed, store, layout_of(packed, 1))

    assert (report.num_sent, report.sent_bytes) == (0, 0)
    assert store.active_layout().num_groups == 1


def test_a_load_that_broke_off_is_unseen_and_goes_on(packed: PackedModel) -> None:
    connection = connect("memory://").weights
    with pytest.raises(StoreUnavailable):
        load_model(packed, FailingStore(connection), layout_of(packed))
    store = ShardStore(connection)
    with pytest.raises(ModelError):
        store.get_manifest(packed.manifest.model_id)

    report = load_model(packed, store, layout_of(packed))

    assert report.num_sent == report.num_segments - 3


@pytest.mark.parametrize("same_length", [True, False])
def test_a_wrong_segment_in_the_store_is_replaced(
    packed: PackedModel, store: ShardStore, same_length: bool
) -> None:
    load_model(packed, store, layout_of(packed))
    model_id = packed.manifest.model_id
    good = packed.read_shard("layer.1").tobytes()
    bad = bytes([good[0] ^ 1]) + good[1:] if same_length else good[:-1]
    store.put_segment(model_id, "layer.1", 0, bad)

    report = load_model(packed, store, layout_of(packed))

    assert report.num_sent == 1
    assert store.read_shard(packed.manifest, "layer.1").tobytes() == good


def test_without_verify_equal_lengths_are_believed(packed: PackedModel, store: ShardStore) -> None:
    load_model(packed, store, layout_of(packed))
    good = packed.read_shard("layer.1").tobytes()
    store.put_segment(packed.manifest.model_id, "layer.1", 0, bytes(len(good)))

    assert load_model(packed, store, layout_of(packed), verify=False).num_sent == 0


def test_a_store_that_keeps_other_bytes_is_found_out(packed: PackedModel) -> None:
    class Forgetful(ShardStore):
        def put_segment(
            self, model_id: str, shard_name: str, index: int, body: bytes | memoryview
        ) -> None:
            super().put_segment(model_id, shard_name, index, bytes(len(body)))

    with pytest.raises(ShardError, match="wrong in the store"):
        load_model(packed, Forgetful(connect("memory://").weights), layout_of(packed))


def test_damage_on_disk_is_not_uploaded(tmp_path: Path, store: ShardStore) -> None:
    packed = open_packed(write_gguf(tmp_path / "m.gguf"), tmp_path)
    path = packed.folder / "layer.0.shard"
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)

    with pytest.raises(ShardError, match=r"layer\.0"):
        load_model(packed, store, layout_of(packed))

    with pytest.raises(ModelError):
        store.get_manifest(packed.manifest.model_id)


def test_a_layout_of_another_model_is_refused(packed: PackedModel, store: ShardStore) -> None:
    with pytest.raises(ModelError, match="other@0"):
        load_model(packed, store, even_layout("other@0", 2, 2))


def test_progress_ends_at_its_total(packed: PackedModel, store: ShardStore) -> None:
    seen: list[tuple[str, int, int]] = []

    load_model(packed, store, layout_of(packed), progress=lambda *turn: seen.append(turn))

    assert seen[0][:2] == ("upload", 0)
    assert seen[-1][1] == seen[-1][2] == sum(s.num_bytes for s in packed.manifest.shards)
