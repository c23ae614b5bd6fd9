"""Writes a GGUF file that is another one with some tensors in fewer bits. Knows no architecture.

Metadata, the tokenizer with it, and the tensors that are kept are those of the source, byte for
byte. Tensors are written one at a time, so that the file may be larger than the memory.

R rows, C cols, G = C/32 groups.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    GGMLQuantizationType,
    GGUFValueType,
    LlamaFileType,
)

from shared.errors import ModelError
from shared.formats.gguf_file import GgufFile
from shared.quant.blocks import Int4Blocks, Int8Blocks

Bytes = npt.NDArray[np.uint8]

# What llama.cpp says of a whole file, for those who list models.
_FILE_TYPES = {
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
}
_REPLACED_KEYS = ("general.architecture", "general.file_type", "general.quantization_version")


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor of the source in another type; `blocks` makes its rows when they are written."""

    type_name: str
    blocks: Callable[[], Int4Blocks | Int8Blocks]


def write_gguf_copy(
    source: GgufFile,
    target: Path,
    replaced: Mapping[str, NewTensor],
    *,
    metadata: Mapping[str, str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write `target`: the tensors of `replaced`, in its order, then the others of the source.

    `metadata` are keys of our own. `progress` is told of the weights written and of all. The file
    appears whole, by a rename. Raises `ModelError` when it cannot be written.
    """
    staging = staging_path(target)
    try:
        _write(source, staging, replaced, metadata, progress)
        with staging.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staging, target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        staging.unlink(missing_ok=True)


def staging_path(target: Path) -> Path:
    """Where `target` is written until it is whole."""
    return target.with_name(f".partial-{target.name}")


def cannot_write(target: Path, error: OSError) -> ModelError:
    """What to raise for a file that cannot be written. NumPy's error has a text alone."""
    return ModelError(
        f"{target} cannot be written: {error.strerror or error}",
        remedy="free some space, or give another place",
    )


def block_bytes(type_name: str, blocks: Int4Blocks | Int8Blocks) -> Bytes:
    """Rows as GGUF keeps them, uint8 (R, bytes of a row). Raises `ModelError` for blocks that the
    type cannot hold: Q4_0 has min = -8 * scale."""
    scale = _halves(blocks.scale)
    match type_name, blocks:
        case "Q4_1", Int4Blocks():
            parts = [scale, _halves(blocks.min), blocks.nibbles]
        case "Q4_0", Int4Blocks():
            if not np.array_equal(blocks.min, np.float16(-8) * blocks.scale):
                raise ModelError("Q4_0 holds no group whose min is not -8 * scale")
            parts = [scale, blocks.nibbles]
        case "Q8_0", Int8Blocks():
            parts = [scale, blocks.q.view(np.uint8)]
        case _:
            raise ModelError(f"{type_name} does not hold {type(blocks).__name__}")
    return np.concatenate(parts, axis=2).reshape(len(scale), -1)


def type_bytes(type_name: str, num_weights: int) -> int:
    """Bytes of so many weights, a multiple of a block, in a type."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return num_weights // block * size


def _write(
    source: GgufFile,
    target: Path,
    replaced: Mapping[str, NewTensor],
    metadata: Mapping[str, str],
    progress: Callable[[int, int], None],
) -> None:
    writer = gguf.GGUFWriter(str(target), str(source.metadata["general.architecture"]))
    copy_metadata(source.path, writer)
    counts: dict[str, int] = {}
    for name, tensor in replaced.items():
        stored = source.tensors[name]
        counts[tensor.type_name] = (
            counts.get(tensor.type_name, 0) + stored.num_rows * stored.num_cols
        )
    writer.add_quantization_version(GGML_QUANT_VERSION)
    if counts:
        writer.add_file_type(_FILE_TYPES[max(counts, key=lambda name: counts[name])])
    for key, value in metadata.items():
        writer.add_string(key, value)
    kept = [name for name in source.tensors if name not in replaced]
    for name, tensor in replaced.items():
        stored = source.tensors[name]
        row_bytes = type_bytes(tensor.type_name, stored.num_cols)
        _announce(writer, name, (*stored.shape[:-1], row_bytes), tensor.type_name)
    for name in kept:
        stored = source.tensors[name]
        row_bytes = stored.num_bytes // stored.num_rows
        _announce(writer, name, (*stored.shape[:-1], row_bytes), stored.type_name)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total = sum(source.tensors[n].num_rows * source.tensors[n].num_cols for n in source.tensors)
        done = 0
        progress(done, total)
        for name in (*replaced, *kept):
            stored = source.tensors[name]
            if name in replaced:
                tensor = replaced[name]
                writer.write_tensor_data(block_bytes(tensor.type_name, tensor.blocks()))
            else:
                writer.write_tensor_data(np.ascontiguousarray(stored.raw))
            stored.release(0, stored.num_rows)
            done += stored.num_rows * stored.num_cols
            progress(done, total)
    finally:
        writer.close()


def _announce(
    writer: gguf.GGUFWriter, name: str, byte_shape: tuple[int, ...], type_name: str
) -> None:
    num_bytes = 1
    for size in byte_shape:
        num_bytes *= size
    kind = GGMLQuantizationType[type_name]
    writer.add_tensor_info(name, byte_shape, np.dtype(np.uint8), num_bytes, raw_dtype=kind)


def copy_metadata(path: Path, writer: gguf.GGUFWriter) -> None:
    """All keys with their own types, which our reader of untrusted files does not keep; it has
    found this file to be whole before."""
    reader = gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in _REPLACED_KEYS:
            continue
        kind = field.types[0]
        item = field.types[-1] if kind is GGUFValueType.ARRAY else None
        if item is not None and not len(field.data):
            continue  # a list of nothing, which the package reads and cannot write
        writer.add_key_value(key, field.contents(), kind, sub_type=item)


def _halves(values: npt.NDArray[Any]) -> Bytes:
    """fp16 (R, G) as bytes (R, G, 2), little-endian."""
    little = np.ascontiguousarray(values.astype("<f2"))
    return little.view(np.uint8).reshape(*values.shape, 2)
