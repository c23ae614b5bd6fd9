"""The shard store: what is read is what the manifest says, or a named error."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest

from shared.errors import ModelError, ShardError
from shared.manifest import Manifest, SegmentEntry, ShardEntry, ShardKind
from shared.store import keys
from shared.store.connection import Stores
from shared.store.shards import SegmentRef, ShardStore
from shared.topology import Layout, even_layout

MODEL = "tiny@0123"


def bytes_of(name: str, num_bytes: int) -> bytes:
    return np.random.default_rng(len(name)).bytes(num_bytes)


def manifest_of(sizes: dict[str, list[int]], model_id: str = MODEL) -> Manifest:
    """Shards of the given segment sizes, filled by `bytes_of`."""
    shards = []
    for name, segment_sizes in sizes.items():
        body = bytes_of(name, sum(segment_sizes))
        segments, start = [], 0
        for size in segment_sizes:
            digest = hashlib.sha256(body[start : start + size]).hexdigest()
            segments.append(SegmentEntry(size, digest))
            start += size
        entry = ShardEntry(name, ShardKind.LAYER, 0, len(body), tuple(segments), ())
        shards.append(entry)
    return Manifest(model_id, {"hidden_size": 64}, tuple(shards), "tiny.gguf", "ab")


SIZES = {"layer-0": [4096, 4096, 100], "layer-10": [77]}
MANIFEST = manifest_of(SIZES)


@pytest.fixture
def shards(stores: Stores) -> ShardStore:
    return ShardStore(stores.weights)


def upload(shards: ShardStore, manifest: Manifest, refs: list[SegmentRef]) -> None:
    for ref in refs:
        entry = manifest.shard(ref.shard_name)
        start = sum(segment.num_bytes for segment in entry.segments[: ref.index])
        body = memoryview(bytes_of(ref.shard_name, entry.num_bytes))
        stop = start + entry.segments[ref.index].num_bytes
        shards.put_segment(manifest.model_id, ref.shard_name, ref.index, body[start:stop])


def upload_all(shards: ShardStore, manifest: Manifest) -> None:
    upload(shards, manifest, shards.missing_segments(manifest, verify=False))
    shards.put_manifest(manifest)


def test_a_shard_is_read_as_it_was_written(shards: ShardStore) -> None:
    upload_all(shards, MANIFEST)

    body = shards.read_shard(shards.get_manifest(MODEL), "layer-0")

    assert body.dtype == np.uint8
    assert body.tobytes() == bytes_of("layer-0", 8292)
    assert body.ctypes.data % 64 == 0
    assert shards.models() == [MODEL]


def test_a_shard_is_read_into_a_given_array(shards: ShardStore) -> None:
    upload_all(shards, MANIFEST)
    room = np.zeros(8292 + 8, np.uint8)

    body = shards.read_shard(MANIFEST, "layer-0", room[4:-4])

    assert np.shares_memory(body, room)
    assert room[4:-4].tobytes() == bytes_of("layer-0", 8292)
    assert room[:4].tolist() == room[-4:].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "out", [np.zeros(8291, np.uint8), np.zeros(8292, np.int8), np.zeros(16584, np.uint8)[::2]]
)
def test_an_array_that_does_not_fit_is_our_mistake(
    shards: ShardStore, out: np.ndarray[tuple[int], np.dtype[np.uint8]]
) -> None:
    upload_all(shards, MANIFEST)

    with pytest.raises(ValueError, match="out must be contiguous uint8"):
        shards.read_shard(MANIFEST, "layer-0", out)


def test_an_upload_that_was_broken_off_goes_on_where_it_stopped(shards: ShardStore) -> None:
    everything = shards.missing_segments(MANIFEST, verify=False)
    upload(shards, MANIFEST, everything[:2])

    missing = shards.missing_segments(MANIFEST, verify=True)

    assert len(everything) == 4
    assert missing == everything[2:] == [SegmentRef("layer-0", 2), SegmentRef("layer-10", 0)]
    upload(shards, MANIFEST, missing)
    assert shards.missing_segments(MANIFEST, verify=True) == []


def test_a_corrupt_segment_is_found_only_by_verifying(shards: ShardStore) -> None:
    upload_all(shards, MANIFEST)
    shards.put_segment(MODEL, "layer-0", 1, bytes(4096))

    assert shards.missing_segments(MANIFEST, verify=False) == []
    assert shards.missing_segments(MANIFEST, verify=True) == [SegmentRef("layer-0", 1)]


def test_a_corrupt_segment_is_never_handed_out(shards: ShardStore, stores: Stores) -> None:
    upload_all(shards, MANIFEST)
    stores.weights.run(("SETRANGE", keys.segment(MODEL, "layer-0", 1), 77, b"\x00\x01\x02"))

    with pytest.raises(
        ShardError, match=r"model tiny@0123, shard layer-0, segment 1 fails its SHA"
    ):
        shards.read_shard(MANIFEST, "layer-0")


def test_a_missing_segment_is_named_with_the_remedy(shards: ShardStore, stores: Stores) -> None:
    upload_all(shards, MANIFEST)
    stores.weights.run(("DEL", keys.segment(MODEL, "layer-10", 0)))

    with pytest.raises(ShardError, match="shard layer-10, segment 0 is missing") as caught:
        shards.read_shard(MANIFEST, "layer-10")

    assert "cellpipe load" in caught.value.remedy


def test_a_short_segment_is_named(shards: ShardStore) -> None:
    upload_all(shards, MANIFEST)
    shards.put_segment(MODEL, "layer-0", 2, b"short")

    assert shards.missing_segments(MANIFEST, verify=False) == [SegmentRef("layer-0", 2)]
    with pytest.raises(ShardError, match="segment 2 has 5 bytes instead of 100"):
        shards.read_shard(MANIFEST, "layer-0")


def test_reading_takes_about_one_segment_more_than_the_shard(shards: ShardStore) -> None:
    manifest = manifest_of({"layer-big": [1 << 20] * 8})
    upload_all(shards, manifest)
    out = np.zeros(8 << 20, np.uint8)
    shards.read_shard(manifest, "layer-big", out)

    tracemalloc.start()
    shards.read_shard(manifest, "layer-big", out)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak_bytes < 4 << 20


def test_a_model_that_is_not_loaded_is_named_with_the_remedy(shards: ShardStore) -> None:
    with pytest.raises(ModelError, match="model 'nope' is not in the store at") as caught:
        shards.get_manifest("nope")

    assert caught.value.remedy == "load it: cellpipe load MODEL"


def test_no_model_at_all_is_a_clear_error(shards: ShardStore) -> None:
    with pytest.raises(ModelError, match="no model is loaded"):
        shards.active_layout()


def test_the_layout_activated_last_is_the_active_one(shards: ShardStore) -> None:
    other = manifest_of(SIZES, "other@9")
    shards.put_manifest(MANIFEST)
    shards.put_manifest(other)
    three, one = even_layout(MODEL, 30, 3), even_layout(MODEL, 30, 1)
    elsewhere = even_layout("other@9", 4, 2)

    for layout in (elsewhere, one, three):
        shards.activate(layout)

    assert shards.active_layout() == three
    assert shards.active_layout("other@9") == elsewhere
    assert shards.layouts(MODEL) == [one, three]
    assert shards.models() == ["other@9", MODEL]


def test_a_model_is_found_by_each_of_its_names(shards: ShardStore) -> None:
    model_id = "smollm2-135m-instruct.q4_1@77"
    for loaded in (model_id, "other@9"):
        shards.put_manifest(manifest_of(SIZES, loaded))
        shards.activate(even_layout(loaded, 4, 1))

    for name in ("smollm2-135m", "SmolLM2-135M", "smollm2-135m-instruct.q4_1", model_id):
        assert shards.active_layout(name).model_id == model_id
    assert shards.active_layout().model_id == "other@9"
    with pytest.raises(ModelError, match=r"instruct\.q4_1@78' has no") as caught:
        shards.active_layout("smollm2-135m-instruct.q4_1@78")
    assert caught.value.remedy.startswith("name one of those, or load it")


def test_a_name_that_several_models_have_is_that_of_the_active_one(shards: ShardStore) -> None:
    for loaded in ("twin@1", "twin@2", "other@9"):
        shards.put_manifest(manifest_of(SIZES, loaded))
        shards.activate(even_layout(loaded, 4, 1))

    with pytest.raises(ModelError, match="2 models are called 'twin': twin@1, twin@2"):
        shards.active_layout("twin")
    shards.activate(even_layout("twin@1", 4, 1))

    assert shards.active_layout("twin").model_id == "twin@1"
    assert shards.active_layout("twin@2").model_id == "twin@2"


def test_a_layout_without_its_model_cannot_be_activated(shards: ShardStore) -> None:
    with pytest.raises(ModelError, match="is not in the store"):
        shards.activate(even_layout("ghost@1", 4, 2))


def test_a_model_without_a_layout_says_so(shards: ShardStore) -> None:
    shards.put_manifest(MANIFEST)
    shards.put_layout(even_layout(MODEL, 4, 2))

    with pytest.raises(ModelError, match=r"has no active layout .*models there: tiny@0123"):
        shards.active_layout(MODEL)


@pytest.mark.parametrize("model_id", ["", "a b", "{x}", "a:b", "x" * 201])
def test_a_model_id_that_cannot_be_part_of_a_key_is_refused(
    shards: ShardStore, model_id: str
) -> None:
    with pytest.raises(ModelError, match="model_id must be"):
        shards.put_manifest(manifest_of(SIZES, model_id))
    with pytest.raises(ModelError, match="layout_id must be"):
        shards.put_layout(Layout(model_id, MODEL, ((0, 1),)))
