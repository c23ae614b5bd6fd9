"""A copy of a GGUF file with some tensors in fewer bits: all else stays, byte for byte."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from shared.errors import ModelError
from shared.formats.gguf_copy import NewTensor, block_bytes, type_bytes, write_gguf_copy
from shared.formats.gguf_file import open_gguf
from shared.formats.reading import read_float32
from shared.quant.nearest import quantize_int4_affine, quantize_int4_symmetric, quantize_int8
from tests.gguf_files import TinyModel, write_gguf

QUANTIZE = {
    "Q4_0": quantize_int4_symmetric,
    "Q4_1": quantize_int4_affine,
    "Q8_0": quantize_int8,
}
SOURCE = TinyModel(matrix_type="F16", embedding_type="F16", layers=1)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("source") / "source.gguf", SOURCE)


def copy(source: Path, target: Path, types: dict[str, str]) -> Path:
    file = open_gguf(source)

    def tensor(name: str, kind: str) -> NewTensor:
        stored = file.tensors[name]
        return NewTensor(kind, lambda: QUANTIZE[kind](read_float32(stored, 0, stored.num_rows)))

    replaced = {name: tensor(name, kind) for name, kind in types.items()}
    write_gguf_copy(file, target, replaced, metadata={"cellpipe.quantization": "a test"})
    return target


@pytest.mark.parametrize("kind", QUANTIZE)
def test_blocks_are_what_the_formats_own_package_reads(kind: str) -> None:
    weights = np.float32(np.random.default_rng(0).normal(size=(6, 96)))
    blocks = QUANTIZE[kind](weights)

    raw = block_bytes(kind, blocks)

    assert raw.nbytes == type_bytes(kind, weights.size)
    read = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert np.allclose(read, blocks.dequantized(), atol=1e-6)


def test_metadata_and_other_tensors_stay(source: Path, tmp_path: Path) -> None:
    types = {"blk.0.ffn_down.weight": "Q4_1", "blk.0.attn_q.weight": "Q8_0"}

    made = open_gguf(copy(source, tmp_path / "made.gguf", types))

    before = open_gguf(source)
    changed = {"general.file_type", "general.quantization_version", "cellpipe.quantization"}
    assert dict(made.metadata) == dict(before.metadata) | {
        key: made.metadata[key] for key in changed
    }
    assert made.metadata["cellpipe.quantization"] == "a test"
    assert {name: made.tensors[name].type_name for name in types} == types
    for name in before.tensors.keys() - types:
        assert made.tensors[name].type_name == before.tensors[name].type_name
        assert np.array_equal(made.tensors[name].raw, before.tensors[name].raw), name


def test_values_keep_their_own_types(source: Path, tmp_path: Path) -> None:
    made = gguf.GGUFReader(copy(source, tmp_path / "made.gguf", {}))

    for key, field in gguf.GGUFReader(source).fields.items():
        if not key.startswith("GGUF."):
            assert made.fields[key].types == field.types, key


def test_equal_input_gives_equal_files(source: Path, tmp_path: Path) -> None:
    types = {"blk.0.ffn_up.weight": "Q4_0"}
    one, two = (copy(source, tmp_path / f"{name}.gguf", types) for name in "ab")

    assert one.read_bytes() == two.read_bytes()


def test_a_copy_that_fails_leaves_nothing_behind(source: Path, tmp_path: Path) -> None:
    def broken() -> None:
        raise ModelError("the weights are no good")

    replaced = {"blk.0.ffn_up.weight": NewTensor("Q4_0", broken)}  # type: ignore[arg-type]

    with pytest.raises(ModelError, match="no good"):
        write_gguf_copy(open_gguf(source), tmp_path / "made.gguf", replaced, metadata={})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "missing" / "made.gguf"

    with pytest.raises(ModelError, match="cannot be written: No such file"):
        write_gguf_copy(open_gguf(source), target, {}, metadata={})


def test_q4_0_takes_no_group_with_a_min_of_its_own() -> None:
    affine = quantize_int4_affine(np.float32(np.arange(32.0))[None])

    with pytest.raises(ModelError, match="Q4_0 holds no group"):
        block_bytes("Q4_0", affine)
