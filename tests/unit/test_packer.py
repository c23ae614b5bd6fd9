"""Packing: what the shards hold is what the file held, and equal input gives equal ids."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.loader.packed import MANIFEST_FILE, PackedModel, open_packed
from services.loader.packer import PackOptions, ShardRoom, pack_shards
from shared.errors import ConfigError, ModelError, ShardError
from shared.formats.description import Int4Blocks, Int8Blocks, layer_tensor
from shared.formats.gguf import read_gguf
from shared.kernel.chunks import BLOCK_ROWS, CHUNK_ALIGN, local_store_need
from shared.manifest import MAX_SEGMENT_BYTES, Manifest, ShardKind, TensorEntry, TensorKind
from shared.model.config import ModelConfig
from shared.model_names import short_name
from shared.quant.pack import unpack_int4, unpack_int8
from shared.text.document import read_text_document
from tests.gguf_files import TinyModel, write_gguf


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "Tiny Model (1).gguf")


@pytest.fixture(scope="module")
def packed(tiny_file: Path, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    return open_packed(tiny_file, tmp_path_factory.mktemp("cache"))


def bytes_of(shard: np.ndarray, entry: TensorEntry) -> np.ndarray:
    return shard[entry.offset : entry.offset + entry.num_bytes]


def test_shards_have_the_names_and_order_of_the_forward_pass(packed: PackedModel) -> None:
    names = [shard.name for shard in packed.manifest.shards]

    assert names == ["tokenizer", "rope", "embedding", "layer.0", "layer.1", "head"]
    assert packed.manifest.shard("layer.1").index == 1
    assert packed.manifest.shard("layer.1").kind is ShardKind.LAYER
    assert [t.name for t in packed.manifest.shard("layer.0").tensors] == [
        "input_layernorm",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "post_attention_layernorm",
        "gate_proj",
        "up_proj",
        "down_proj",
    ]
    assert [t.name for t in packed.manifest.shard("head").tensors] == ["norm"]


@pytest.mark.parametrize("matrix_type", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_number_is_carried_over_losslessly(
    tmp_path: Path, matrix_type: str, tied: bool
) -> None:
    path = write_gguf(tmp_path / "m.gguf", TinyModel(matrix_type=matrix_type, tied=tied))
    description = read_gguf(path)
    packed = open_packed(path, tmp_path)

    seen = 0
    for shard in packed.manifest.shards:
        content = packed.read_shard(shard.name)
        for entry in shard.tensors:
            if shard.kind is ShardKind.ROPE:
                continue
            is_layer = shard.kind is ShardKind.LAYER
            key = layer_tensor(shard.index, entry.name) if is_layer else entry.name
            expected = description.tensors[key].read()
            raw = bytes_of(content, entry)
            sizes = (entry.rows, entry.cols, entry.chunk_rows)
            match expected:
                case Int4Blocks():
                    scale, low, nibbles = unpack_int4(raw, *sizes)
                    np.testing.assert_array_equal(scale, expected.scale)
                    np.testing.assert_array_equal(low, expected.min)
                    np.testing.assert_array_equal(nibbles, expected.nibbles)
                case Int8Blocks():
                    scale, q = unpack_int8(raw, *sizes)
                    np.testing.assert_array_equal(scale, expected.scale)
                    np.testing.assert_array_equal(q, expected.q)
                case norm:
                    np.testing.assert_array_equal(raw.view("<f4"), norm[0])
            seen += 1
    assert seen == len(description.tensors)


def test_offsets_and_lengths_are_as_the_manifest_promises(packed: PackedModel) -> None:
    for shard in packed.manifest.shards:
        content = packed.read_shard(shard.name, verify=True)
        assert content.dtype == np.uint8
        assert content.ctypes.data % 64 == 0
        assert sum(s.num_bytes for s in shard.segments) == shard.num_bytes == len(content)
        assert all(s.num_bytes <= MAX_SEGMENT_BYTES for s in shard.segments)
        end = 0
        for tensor in shard.tensors:
            assert tensor.offset % CHUNK_ALIGN == 0
            assert tensor.offset >= end
            end = tensor.offset + tensor.num_bytes
        assert end <= shard.num_bytes


def test_rope_tables_are_the_papers_angles(packed: PackedModel) -> None:
    config = ModelConfig.from_dict(packed.manifest.config)
    shard = packed.manifest.shard("rope")
    content = packed.read_shard("rope")

    cos = bytes_of(content, shard.tensor("cos")).view("<f4").reshape(128, 8)
    sin = bytes_of(content, shard.tensor("sin")).view("<f4").reshape(128, 8)

    assert config.max_position_embeddings == 128
    angle = 5 * 10_000.0 ** (-2 * 3 / 16)
    assert cos[5, 3] == np.float32(np.cos(angle))
    assert sin[5, 3] == np.float32(np.sin(angle))
    assert (cos[0] == 1).all()
    assert (sin[0] == 0).all()


def test_the_rope_shard_is_bounded_by_max_context(tiny_file: Path, tmp_path: Path) -> None:
    packed = open_packed(tiny_file, tmp_path, options=PackOptions(max_context=32))

    assert packed.manifest.config["max_position_embeddings"] == 32
    assert packed.manifest.shard("rope").tensor("cos").rows == 32


def test_the_tokenizer_shard_gives_the_tokenizer(packed: PackedModel) -> None:
    tokenizer, template = read_text_document(packed.read_shard("tokenizer").tobytes())

    assert template is not None
    assert tokenizer.decode(tokenizer.encode("hello", parse_special=True)) == "hello"


def test_chunks_fit_a_smaller_local_store(tiny_file: Path) -> None:
    options = PackOptions(local_store_bytes=8192)

    for shard in pack_shards(read_gguf(tiny_file), options):
        for tensor in shard.entry.tensors:
            if tensor.kind is not TensorKind.F32:
                need = local_store_need(tensor.kind.value, tensor.cols, tensor.chunk_rows)
                assert need <= 8192
                assert tensor.chunk_rows % BLOCK_ROWS == 0


def test_shards_in_one_room_are_those_of_rooms_of_their_own(tiny_file: Path) -> None:
    description = read_gguf(tiny_file)
    room = ShardRoom()
    room.zeros(1 << 20)[:] = 255  # what was there before does not show through

    alone = {shard.entry.name: shard.data.tobytes() for shard in pack_shards(description)}
    shared = {s.entry.name: s.data.tobytes() for s in pack_shards(description, room=room)}

    assert shared == alone


def test_a_local_store_that_is_too_small_is_refused(tiny_file: Path) -> None:
    with pytest.raises(ConfigError, match="local_store_bytes"):
        list(pack_shards(read_gguf(tiny_file), PackOptions(local_store_bytes=1000)))


def test_equal_files_give_equal_ids_and_others_do_not(tiny_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / tiny_file.name
    copy.write_bytes(tiny_file.read_bytes())
    other = write_gguf(tmp_path / "other" / tiny_file.name, TinyModel(seed=8))
    theta = write_gguf(
        tmp_path / "theta" / tiny_file.name, TinyModel(metadata={"llama.rope.freq_base": 9e3})
    )

    ids = [
        open_packed(path, tmp_path / f"cache{i}").manifest.model_id
        for i, path in enumerate((tiny_file, copy, other, theta))
    ]

    assert ids[0] == ids[1]
    assert len(set(ids)) == 3
    name, _, digest = ids[0].partition("@")
    assert name == "tiny-model-1"
    assert len(bytes.fromhex(digest)) == 6


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct.q4_1"),
        ("Ünï & co.gguf", "n-co"),
        ("__.gguf", "model"),
        ("x" * 80 + ".gguf", "x" * 48),
    ],
)
def test_names_are_fit_for_keys_and_queues(source: str, name: str) -> None:
    assert short_name(source) == name


def test_the_source_is_recorded(packed: PackedModel, tiny_file: Path) -> None:
    assert packed.manifest.source == tiny_file.name
    assert packed.manifest.source_sha256 == hashlib.sha256(tiny_file.read_bytes()).hexdigest()
    assert Manifest.from_json(packed.manifest.to_json()) == packed.manifest


def test_a_model_is_packed_once(tiny_file: Path, tmp_path: Path) -> None:
    stages: list[str] = []
    open_packed(tiny_file, tmp_path, progress=lambda stage, *_: stages.append(stage))
    num_stages = len(stages)

    open_packed(tiny_file, tmp_path, progress=lambda stage, *_: stages.append(stage))

    assert num_stages == 7
    assert len(stages) == num_stages
    assert not list(tmp_path.glob("packed/.packing-*"))


def test_a_changed_file_is_packed_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    first = open_packed(path, tmp_path).manifest.model_id
    write_gguf(path, TinyModel(seed=9))
    os.utime(path, ns=(1, 1))  # a clock that stands still must not hide the change

    assert open_packed(path, tmp_path).manifest.model_id != first


def test_a_packing_with_a_short_shard_is_made_again(tiny_file: Path, tmp_path: Path) -> None:
    packed = open_packed(tiny_file, tmp_path)
    shard = packed.folder / "layer.0.shard"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])

    again = open_packed(tiny_file, tmp_path)

    assert again.read_shard("layer.0").tobytes() == whole


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "null", "\x00"])
def test_a_packing_with_a_garbled_manifest_is_made_again(
    tiny_file: Path, tmp_path: Path, text: str
) -> None:
    packed = open_packed(tiny_file, tmp_path)
    (packed.folder / MANIFEST_FILE).write_text(text)

    again = open_packed(tiny_file, tmp_path)

    assert again.manifest == packed.manifest


def test_what_a_killed_packing_left_is_removed(tiny_file: Path, tmp_path: Path) -> None:
    folder = open_packed(tiny_file, tmp_path).folder
    left_over = folder.rename(folder.parent / f".packing-{folder.name}")
    (left_over / "layer.0.shard").write_bytes(b"half")

    again = open_packed(tiny_file, tmp_path)
    again.verify()

    assert not left_over.exists()


def test_two_packings_at_once_are_one(tiny_file: Path, tmp_path: Path) -> None:
    stages: list[str] = []

    with ThreadPoolExecutor(2) as pool:
        opened = pool.map(
            lambda _: open_packed(
                tiny_file,
                tmp_path,
                progress=lambda stage, done, _: stages.append(f"{stage} {done}"),
            ),
            range(2),
        )
        folders = {packed.folder for packed in opened}

    assert len(folders) == 1
    assert stages.count("pack 0") == 1


def test_damage_is_named_when_a_shard_is_read(tiny_file: Path, tmp_path: Path) -> None:
    packed = open_packed(tiny_file, tmp_path)
    shard = packed.folder / "layer.1.shard"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    (packed.folder / "head.shard").unlink()

    with pytest.raises(ShardError, match=r"shard layer\.1 .*segment 0 fails its SHA-256") as caught:
        packed.verify()
    with pytest.raises(ShardError, match="shard head"):
        packed.read_shard("head")

    assert str(packed.folder) in caught.value.remedy


def test_a_bad_model_leaves_nothing_behind(tmp_path: Path) -> None:
    norm = np.full(64, np.inf, np.float32)
    path = write_gguf(tmp_path / "m.gguf", TinyModel(tensors={"output_norm.weight": (norm, "F32")}))

    with pytest.raises(ModelError, match=r"output_norm\.weight"):
        open_packed(path, tmp_path)

    assert [
        f.name for f in (tmp_path / "packed").iterdir() if not f.name.startswith(".lock-")
    ] == []


def test_tables_of_other_sizes_follow_the_config(packed: PackedModel) -> None:
    config = ModelConfig.from_dict(packed.manifest.config)

    cos, sin = replace(config, max_position_embeddings=3).rope_tables().values()

    assert cos.shape == sin.shape == (3, 8)
    assert cos.dtype == np.float32
