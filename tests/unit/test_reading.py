"""Every type of a stored tensor: read by row ranges, and brought into the kernel's formats."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from services.loader.packed import open_packed
from services.loader.packer import PackOptions
from services.loader.packer import tensor_entry as entry_of
from services.loader.tensors import PIECE_VALUES, SAMPLED, pack_tensor, summed
from shared.errors import ModelError
from shared.formats.description import TensorView, tensor_view
from shared.formats.gguf import read_gguf
from shared.formats.reading import KERNEL_KINDS, is_lossless, read_float32, read_rows
from shared.formats.stored_tensor import MappedFile, StoredTensor
from shared.kernel.chunks import aligned_zeros
from shared.kernel.matrix import PackedMatrix
from shared.manifest import TensorKind
from shared.quant.blocks import float32_of
from shared.quant.pack import dequantize
from tests.gguf_files import BLOCK_TYPES, TinyModel, random_blocks, write_gguf

FLOATS = {"F32": "<f4", "F16": "<f2"}


def stored(folder: Path, type_name: str, raw: np.ndarray, rows: int, cols: int) -> StoredTensor:
    """A tensor that lies at an odd place of a file."""
    path = folder / f"{type_name}.tensor"
    path.write_bytes(b"?" * 7 + raw.tobytes() + b"!")
    return StoredTensor(MappedFile(path, "test"), "w", type_name, (rows, cols), 7, raw.nbytes)


def of_type(folder: Path, type_name: str, rows: int = 48, cols: int = 512) -> StoredTensor:
    if type_name in BLOCK_TYPES:
        raw = random_blocks(type_name, rows, cols)
    else:
        values = np.random.default_rng(1).standard_normal((rows, cols)).astype(np.float32)
        raw = values if type_name == "BF16" else values.astype(FLOATS[type_name])
        if type_name == "BF16":
            raw = raw.view("<u2")[:, 1::2].copy()
    return stored(folder, type_name, raw, rows, cols)


@pytest.mark.parametrize("type_name", KERNEL_KINDS)
def test_float32_is_what_the_gguf_package_says(tmp_path: Path, type_name: str) -> None:
    tensor = of_type(tmp_path, type_name)
    kind = gguf.GGMLQuantizationType[type_name]
    typed = tensor.raw.reshape(48, -1)
    typed = typed.view(FLOATS[type_name]) if type_name in FLOATS else typed
    expected = gguf.quants.dequantize(typed, kind).astype(np.float32)

    np.testing.assert_array_equal(read_float32(tensor, 0, 48), expected)
    np.testing.assert_array_equal(read_float32(tensor, 17, 19), expected[17:19])


# What moving random values of each type may cost, as docs/formats.md tells of real ones.
MOST_RELATIVE_RMS = {
    "Q4_K": 0.002, "Q5_1": 0.01, "Q5_K": 0.01, "Q6_K": 0.01, "Q3_K": 0.01, "Q2_K": 0.15,
    "F16": 0.01, "BF16": 0.01, "F32": 0.01,
}  # fmt: skip


@pytest.mark.parametrize("type_name", KERNEL_KINDS)
def test_each_type_becomes_the_nearest_of_the_kernels(tmp_path: Path, type_name: str) -> None:
    tensor = of_type(tmp_path, type_name)
    kind = KERNEL_KINDS[type_name]
    expected = read_float32(tensor, 0, 48)

    got = float32_of(read_rows(tensor, kind, 0, 48))

    if is_lossless(tensor, kind):
        np.testing.assert_array_equal(got, expected)
    else:
        error = float(np.sqrt(np.square(got - expected).sum() / np.square(expected).sum()))
        assert 0 < error < MOST_RELATIVE_RMS[type_name]
    part = float32_of(read_rows(tensor, kind, 5, 21))
    np.testing.assert_array_equal(part, got[5:21])


@pytest.mark.parametrize("type_name", KERNEL_KINDS)
@pytest.mark.parametrize("kind", TensorKind)
def test_any_type_can_be_kept_in_any_format(
    tmp_path: Path, type_name: str, kind: TensorKind
) -> None:
    tensor = of_type(tmp_path, type_name)
    expected = read_float32(tensor, 0, 48)

    got = float32_of(read_rows(tensor, kind, 0, 48))

    most = {TensorKind.INT4: 0.25, TensorKind.INT8: 0.012, TensorKind.F32: 0.0}[kind]
    assert np.square(got - expected).sum() <= most**2 * np.square(expected).sum()


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_scales_that_are_not_finite_are_refused(tmp_path: Path, type_name: str, bad: float) -> None:
    raw = random_blocks(type_name, 4, 256).reshape(4, -1)
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(type_name, 0)
    raw[2, at : at + 2] = np.array([bad], np.float16).view(np.uint8)
    tensor = stored(tmp_path, type_name, raw, 4, 256)

    for kind in (KERNEL_KINDS[type_name], TensorKind.F32):
        with pytest.raises(ModelError, match="tensor w holds NaN or infinity"):
            read_rows(tensor, kind, 0, 4)


def test_values_beyond_fp16_are_refused_with_the_tensors_name(tmp_path: Path) -> None:
    tensor = stored(tmp_path, "F32", np.full((4, 32), 1e30, np.float32), 4, 32)

    with pytest.raises(ModelError, match="tensor w cannot be kept as int8: scale at row 0"):
        read_rows(tensor, TensorKind.INT8, 0, 4)


def view_of(tensor: StoredTensor, rows: int, cols: int, first_row: int = 0) -> TensorView:
    return tensor_view("q_proj", tensor, rows, cols, first_row=first_row)


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_K", "Q6_K", "BF16"])
@pytest.mark.parametrize(("rows", "cols"), [(48, 512), (700, 2048)])
def test_pieces_make_the_whole(tmp_path: Path, type_name: str, rows: int, cols: int) -> None:
    tensor = of_type(tmp_path, type_name, rows, cols)
    view = view_of(tensor, rows - 16, cols, first_row=16)
    entry = entry_of("q_proj", view, 0, PackOptions())
    out = aligned_zeros(entry.num_bytes)

    pack_tensor(view, entry, out)

    packed = PackedMatrix(entry.kind.value, entry.rows, cols, entry.chunk_rows, out)
    whole = float32_of(read_rows(tensor, view.kind, 16, rows))
    np.testing.assert_array_equal(dequantize(packed), whole)
    assert rows < 100 or rows * cols > 2 * PIECE_VALUES


def test_the_error_of_repacking_is_told_by_tensor_and_type(tmp_path: Path) -> None:
    rows = 64
    tensor = of_type(tmp_path, "Q6_K", rows)
    view = view_of(tensor, rows, 512)
    entry = entry_of("q_proj", view, 0, PackOptions())

    error = pack_tensor(view, entry, aligned_zeros(entry.num_bytes))

    assert error is not None
    (told,) = summed([error, replace(error, difference=0.0)])
    assert (told.tensor, told.source_type, told.kind) == ("q_proj", "Q6_K", TensorKind.INT8)
    source = read_float32(tensor, 0, rows // SAMPLED)
    moved = float32_of(view.read_rows(0, rows // SAMPLED)) - source
    once = np.sqrt(np.square(moved).sum() / np.square(source).sum())
    assert told.relative_rms == pytest.approx(once / 2**0.5, rel=1e-3)


def test_a_mixed_file_is_packed_and_says_what_moved(tmp_path: Path) -> None:
    """As Q4_K_M: most of it Q4_K, some Q6_K, norms F32, one of them F16."""
    shape = TinyModel(hidden=256, inner=256, layers=2, heads=4, kv_heads=4)
    mixed = {
        name: (random_blocks("Q6_K" if "_v." in name or "_down." in name else "Q4_K", *size), kind)
        for name, size in shape.shapes().items()
        if len(size) == 2
        for kind in ("Q6_K" if "_v." in name or "_down." in name else "Q4_K",)
    }
    mixed["blk.1.ffn_norm.weight"] = (np.ones(256), "F16")
    path = write_gguf(tmp_path / "m.gguf", replace(shape, tensors=mixed))

    packed = open_packed(path, tmp_path)
    packed.verify()

    told = {(r.tensor, r.source_type): r for r in packed.manifest.repacked}
    assert told["v_proj", "Q6_K"].kind is TensorKind.INT8
    assert told["q_proj", "Q4_K"].kind is TensorKind.INT4
    assert 0 < told["q_proj", "Q4_K"].relative_rms < 0.002
    assert 0 < told["v_proj", "Q6_K"].relative_rms < 0.01
    assert ("post_attention_layernorm", "F16") not in told
    assert read_gguf(path).tensors["layer.1.post_attention_layernorm"].read().sum() == 256


def test_lossless_files_say_that_nothing_moved(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", TinyModel(matrix_type="Q5_0"))

    assert open_packed(path, tmp_path).manifest.repacked == ()


@pytest.mark.parametrize("type_name", ["Q4_0", "Q6_K", "F32"])
def test_memory_does_not_grow_with_a_tensor(tmp_path: Path, type_name: str) -> None:
    """A large embedding is read and packed in pieces: the shard, and a few float32 pieces."""
    rows, cols = 8192, 1024
    tensor = of_type(tmp_path, type_name, rows, cols)
    view = view_of(tensor, rows, cols)
    entry = entry_of("q_proj", view, 0, PackOptions())
    out = aligned_zeros(entry.num_bytes)

    tracemalloc.start()
    pack_tensor(view, entry, out)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert rows * cols == 16 * PIECE_VALUES
    assert peak_bytes < 10 * 4 * PIECE_VALUES  # the whole in float32 would be 16 of them
