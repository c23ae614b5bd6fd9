"""Safetensors: what is read, and that everything else is one clear ModelError."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.errors import ModelError
from shared.formats.reading import read_float32, read_rows
from shared.formats.safetensors_file import (
    INDEX_FILE,
    MAX_HEADER_BYTES,
    open_folder,
    open_safetensors,
)
from shared.manifest import TensorKind
from shared.quant.blocks import float32_of
from tests.safetensors_files import bf16_bits, write_safetensors, write_sharded

MATRIX = np.linspace(-1, 1, 8 * 64, dtype=np.float32).reshape(8, 64)


def refused(action: Callable[[], object]) -> str:
    """The one line of the refusal."""
    with pytest.raises(ModelError) as caught:
        action()
    assert caught.value.remedy
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_every_float_type_is_read_exactly_by_row_ranges(tmp_path: Path, dtype: str) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"w": (MATRIX, dtype)})
    match dtype:
        case "F16":
            expected = MATRIX.astype(np.float16).astype(np.float32)
        case "BF16":
            expected = (bf16_bits(MATRIX).astype(np.uint32) << 16).view(np.float32)
        case _:
            expected = MATRIX

    tensor = open_safetensors(path)["w"]

    assert (tensor.type_name, tensor.shape) == (dtype, (8, 64))
    np.testing.assert_array_equal(read_float32(tensor, 0, 8), expected)
    np.testing.assert_array_equal(read_float32(tensor, 3, 5), expected[3:5])


def test_the_safetensors_package_agrees_where_it_is_installed(tmp_path: Path) -> None:
    numpy_side = pytest.importorskip("safetensors.numpy")
    arrays = {"a": MATRIX, "b.c": np.arange(5, dtype=np.float16), "scalar": np.array(3, np.float32)}
    numpy_side.save_file(arrays, tmp_path / "m.safetensors", metadata={"format": "np"})

    tensors = open_safetensors(tmp_path / "m.safetensors")

    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        got = read_float32(tensors[name], 0, 1 if array.ndim < 2 else len(array))
        np.testing.assert_array_equal(got.reshape(np.shape(array)), array)


@pytest.mark.parametrize(("kind", "steps"), [(TensorKind.INT8, 254), (TensorKind.INT4, 15)])
def test_rows_are_quantised_to_the_nearest(tmp_path: Path, kind: TensorKind, steps: int) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"w": (MATRIX, "F32")})

    got = float32_of(read_rows(open_safetensors(path)["w"], kind, 2, 7))

    groups = MATRIX[2:7].reshape(5, 2, 32)
    largest = 2 * np.abs(groups).max(axis=2) if kind is TensorKind.INT8 else np.ptp(groups, axis=2)
    step = (largest / steps).repeat(32, axis=1)
    assert (np.abs(got - MATRIX[2:7]) <= 0.5 * step + 2.0**-10).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, bad: float, dtype: str) -> None:
    values = MATRIX.copy()
    values[6, 1] = bad
    tensor = open_safetensors(write_safetensors(tmp_path / "m.safetensors", {"w": (values, dtype)}))

    read_float32(tensor["w"], 0, 6)

    assert "tensor w holds NaN or infinity" in refused(lambda: read_float32(tensor["w"], 0, 8))


def test_a_type_that_no_weights_have_is_named_when_it_is_read(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", {"ids": (np.arange(4), "I64")})

    tensor = open_safetensors(path)["ids"]

    assert "tensor ids has type I64" in refused(lambda: read_float32(tensor, 0, 1))


def header(entries: Mapping[str, Any] | str | bytes, body: bytes = bytes(8)) -> bytes:
    text = json.dumps(entries) if isinstance(entries, Mapping) else entries
    raw = text if isinstance(text, bytes) else text.encode()
    return len(raw).to_bytes(8, "little") + raw + body


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


WRONG_FILES = {
    "empty": (b"", "cannot be read"),
    "short": (b"abc", "it has 3 bytes"),
    "absurd header": (b"\xff" * 64, f"limit {MAX_HEADER_BYTES}"),
    "header over the end": (header({"a": entry()})[:30], "its header ends at byte"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip archive, as torch.save writes"),
    "pickle": (b"\x80\x02}q\x00." + bytes(60), "it is a pickle, which can run code"),
    "gguf": (b"GGUF" + bytes(60), "it is a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer"),
    "page": (b"<!DOCTYPE html><html>", "a web page"),
    "no json": (header(b"{'a': 1}"), "its JSON cannot be read"),
    "no utf-8": (header(b'{"\xff": 1}'), "its JSON cannot be read"),
    "list": (header("[1, 2]"), "its JSON is a list"),
    "nan": (header('{"a": NaN}'), "NaN is no JSON"),
    "twice": (header('{"a": 1, "a": 1}'), "a key comes twice"),
    "deep": (header('{"a":' + "[" * 100_000), "its JSON cannot be read"),
    "many parts": (header("[" * 400_000), "more parts than"),
    "huge number": (header('{"a": ' + "9" * 5000 + "}"), "its JSON cannot be read"),
    "no entry": (header({"a": 3}), "has another entry"),
    "more keys": (header({"a": entry() | {"x": 1}}), "has another entry"),
    "dtype": (header({"a": entry(dtype="F31")}), "unknown dtype 'F31'"),
    "dtype is a list": (header({"a": entry(dtype=["F32"])}), "unknown dtype"),
    "negative size": (header({"a": entry(shape=[-2])}), "impossible shape"),
    "bool size": (header({"a": entry(shape=[True, 2])}), "impossible shape"),
    "float size": (header({"a": entry(shape=[2.0])}), "impossible shape"),
    "huge size": (header({"a": entry(shape=[2**50, 2**50])}), "impossible shape"),
    "many dims": (header({"a": entry(shape=[1] * 9)}), "impossible shape"),
    "three offsets": (header({"a": entry(offsets=[0, 4, 8])}), "impossible data_offsets"),
    "backward": (header({"a": entry(offsets=[8, 0])}), "impossible data_offsets"),
    "outside": (header({"a": entry(shape=[4], offsets=[0, 16])}), "it is truncated"),
    "product": (header({"a": entry(shape=[3])}), "needs 12 bytes, its data_offsets give 8"),
    "overlap": (
        header({"a": entry(), "b": entry(shape=[1], offsets=[4, 8])}),
        "'b' overlaps the one before it",
    ),
    "hole": (header({"a": entry(shape=[1], offsets=[4, 8])}), "'a' comes after a hole"),
    "left over": (header({"a": entry()}, bytes(9)), "its tensors end at byte"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, named = WRONG_FILES[case]
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)

    assert named in refused(lambda: open_safetensors(path))


def test_a_sharded_folder_is_one_set_of_tensors(tmp_path: Path) -> None:
    write_sharded(tmp_path, [{"a": (MATRIX, "F16")}, {"b": (MATRIX[0], "F32")}])

    folder = open_folder(tmp_path)

    assert {name: t.shape for name, t in folder.tensors.items()} == {"a": (8, 64), "b": (64,)}
    assert len(folder.files) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_folder_with_one_file_needs_no_index(tmp_path: Path, name: str) -> None:
    write_safetensors(tmp_path / name, {"a": (MATRIX, "F32")})

    assert set(open_folder(tmp_path).tensors) == {"a"}


def test_missing_shards_are_named(tmp_path: Path) -> None:
    files = write_sharded(tmp_path, [{n: (MATRIX, "F16")} for n in "abc"])
    files[0].unlink()
    files[2].unlink()

    message = refused(lambda: open_folder(tmp_path))

    assert f"lacks 2 of 3 shards: {files[0].name}, {files[2].name}" in message


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/a.safetensors",
        "..\\a.safetensors",
        "a.safetensors\x00",
        ".hidden.safetensors",
        "pytorch_model.bin",
        "",
        3,
        None,
    ],
)
def test_an_index_names_files_of_its_own_folder_alone(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(tmp_path / "secret.safetensors", {"a": (MATRIX, "F16")})
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": file}}))

    assert "it puts tensor 'a' into" in refused(lambda: open_folder(folder))


@pytest.mark.parametrize("indexed", [True, False])
def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path, indexed: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    secret = write_safetensors(tmp_path / "secret.safetensors", {"a": (MATRIX, "F16")})
    (folder / "m.safetensors").symlink_to(secret)
    if indexed:
        (folder / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "m.safetensors"}}))

    assert "leads out of the folder" in refused(lambda: open_folder(folder))


def test_a_snapshot_of_the_hubs_cache_is_taken(tmp_path: Path) -> None:
    blob = write_safetensors(tmp_path / "blobs" / "0123abcd", {"a": (MATRIX, "F16")})
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(blob)

    assert set(open_folder(snapshot).tensors) == {"a"}


def test_a_tensor_that_the_index_places_elsewhere_is_refused(tmp_path: Path) -> None:
    files = write_sharded(tmp_path, [{"a": (MATRIX, "F16")}, {"b": (MATRIX, "F16")}])
    weight_map = {"a": files[1].name, "b": files[1].name}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))

    assert "tensor 'a' of the index is not in it" in refused(lambda: open_folder(tmp_path))

    weight_map = {"a": files[0].name, "c": files[1].name}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))

    assert "tensor 'b' is in it, the index says nothing" in refused(lambda: open_folder(tmp_path))


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}', "nonsense"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)

    assert INDEX_FILE in refused(lambda: open_folder(tmp_path))


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["pytorch_model.bin"], "only pytorch_model.bin: a pickle"),
        (["config.json"], "has no safetensors file"),
        (["a.safetensors", "b.safetensors"], "has 2 safetensors files and no"),
    ],
)
def test_a_folder_without_weights_says_what_it_has(
    tmp_path: Path, files: list[str], named: str
) -> None:
    for file in files:
        (tmp_path / file).write_bytes(b"")

    assert named in refused(lambda: open_folder(tmp_path))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "nowhere" in refused(lambda: open_folder(tmp_path / "nowhere"))


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_a_mutated_header_is_read_or_refused_and_nothing_else(
    tmp_path: Path, edits: list[tuple[float, int]]
) -> None:
    whole = write_safetensors(
        tmp_path / "whole.safetensors", {"a": (MATRIX, "F16"), "b": (MATRIX[0], "BF16")}
    ).read_bytes()
    content = bytearray(whole)
    header_bytes = 8 + int.from_bytes(whole[:8], "little")
    for where, value in edits:
        content[int(where * header_bytes)] = value
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)

    tracemalloc.start()
    try:
        for tensor in open_safetensors(path).values():
            if tensor.num_bytes:
                read_float32(tensor, 0, tensor.num_rows)
    except ModelError:
        pass
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert peak_bytes < 1 << 20


def test_a_header_of_nonsense_costs_a_bounded_multiple_of_itself(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    worst = b'{"a":[' + b"0," * (1 << 20) + b"0]}"
    path.write_bytes(header(worst))

    tracemalloc.start()
    refused(lambda: open_safetensors(path))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak_bytes < 12 * len(worst)
