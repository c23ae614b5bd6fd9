"""The GGUF container: metadata and the tensor table, from untrusted bytes. Knows no architecture.

The `gguf` package gives the format's constants. Its `GGUFReader` is not used: it keeps an array
object for every element (2.5 s and 160 MB for a vocabulary of 49,152 tokens, against 0.1 s here),
and it believes the counts in the header, so that a truncated file can make it loop without end.
Here every count is checked against the bytes that are left before anything is made from it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
)

from shared.errors import ModelError
from shared.formats.stored_tensor import MappedFile, StoredTensor

SUPPORTED_VERSIONS = (2, 3)
MAX_METADATA_ITEMS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ARRAY_ITEMS = 1 << 22  # of all arrays: the largest vocabularies have 2**18 tokens
MAX_STRING_BYTES = 1 << 24
MAX_DIMS = 4
MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 2**18 tokens with its merges takes 20 MB
FILE_REMEDY = "fetch the file again, or give another .gguf file"

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file. `metadata` values are int, float, bool, str or a list of one of them."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def open_gguf(path: Path) -> GgufFile:
    """Parse a GGUF file's header and map its tensors.

    Raises `ModelError` for a file that is missing, no GGUF, of an unknown version or byte order,
    truncated, or at odds with itself.
    """
    file = MappedFile(path, "GGUF")
    cursor = _Cursor(file.buffer, path)
    magic, version = cursor.scalar("I"), cursor.scalar("I")
    if magic != GGUF_MAGIC:
        raise cursor.error("it does not start with the GGUF magic", remedy="give a .gguf file")
    if version not in SUPPORTED_VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "it is big-endian" if swapped in SUPPORTED_VERSIONS else f"version {version}"
        raise cursor.error(f"{what}; little-endian GGUF versions 2 and 3 are read")
    num_tensors = cursor.count("number of tensors", MAX_TENSORS, least_bytes=24)
    num_items = cursor.count("number of metadata items", MAX_METADATA_ITEMS, least_bytes=13)
    metadata: dict[str, Any] = {}
    for _ in range(num_items):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.error(f"metadata key {key!r:.80} appears twice")
        metadata[key] = cursor.value(key)
    _refuse_parts(cursor, metadata)
    table = [cursor.tensor_info() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    # bool is an int to Python, and a hostile file may say True here.
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise cursor.error(f"general.alignment is no power of two: {alignment!r:.40}")
    data_start = -(-cursor.position // alignment) * alignment
    file_bytes = len(file.content)
    tensors: dict[str, StoredTensor] = {}
    for name, kind, shape, offset in table:
        if name in tensors:
            raise cursor.error(f"tensor {name!r:.80} appears twice")
        start = data_start + offset
        size = _size_bytes(cursor, name, kind, shape)
        if start + size > file_bytes:
            raise cursor.error(
                f"tensor {name} ends at byte {start + size}, the file has {file_bytes}: "
                "it is truncated"
            )
        tensors[name] = StoredTensor(file, name, kind.name, shape, start, size)
    _refuse_overlaps(cursor, tensors)
    return GgufFile(path, metadata, tensors)


def _refuse_overlaps(cursor: _Cursor, tensors: Mapping[str, StoredTensor]) -> None:
    """A small file must not stand for many large tensors."""
    end = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise cursor.error(f"tensor {tensor.name!r:.80} overlaps the one before it")
        end = tensor.offset + tensor.num_bytes


def _refuse_parts(cursor: _Cursor, metadata: Mapping[str, Any]) -> None:
    """Files that were split say so in each part."""
    count = metadata.get("split.count")
    if type(count) is int and count > 1:
        number = metadata.get("split.no")
        part = number + 1 if type(number) is int else "one"
        raise cursor.error(
            f"it is part {part} of {count} of a model that was split",
            remedy="join the parts first: llama-gguf-split --merge FIRST_PART WHOLE",
        )


def _size_bytes(
    cursor: _Cursor, name: str, kind: GGMLQuantizationType, shape: tuple[int, ...]
) -> int:
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block_values:
        raise cursor.error(f"tensor {name} has rows of {shape[-1]} values, no multiple of a block")
    num_values = 1
    for size in shape:
        num_values *= size
    return num_values // block_values * block_bytes


class _Cursor:
    """A read position in the header that refuses to step over the end of the file."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self._buffer = buffer
        self._path = path
        self.position = 0
        self._items_left = MAX_ARRAY_ITEMS

    def error(self, what: str, *, remedy: str = FILE_REMEDY) -> ModelError:
        return ModelError(f"{self._path.name} is not a usable GGUF file: {what}", remedy=remedy)

    def take(self, num_bytes: int, what: str) -> bytes:
        end = self.position + num_bytes
        if end > MAX_HEADER_BYTES:
            raise self.error(f"its header is longer than {MAX_HEADER_BYTES} bytes, in {what:.80}")
        if end > len(self._buffer):
            raise self.error(f"{what} ends at byte {end}, the file has {len(self._buffer)}")
        taken = self._buffer[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self.take(size, "the header"))[0]

    def count(self, what: str, limit: int, *, least_bytes: int) -> int:
        """A count of things that take at least `least_bytes` each, so it cannot exceed the file."""
        number: int = self.scalar("Q")
        left = len(self._buffer) - self.position
        if number > limit or number * least_bytes > left:
            raise self.error(f"the {what} is {number}, with {left} bytes left (limit {limit})")
        return number

    def string(self, what: str) -> str:
        length = self.count(f"length of {what:.80}", MAX_STRING_BYTES, least_bytes=1)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what:.80} is not UTF-8: {error.reason}") from error

    def value(self, key: str) -> Any:
        kind = self._value_type(key)
        if kind is not GGUFValueType.ARRAY:
            return self._scalar_or_string(kind, key)
        item = self._value_type(key)
        if item is GGUFValueType.ARRAY:
            raise self.error(f"metadata {key!r:.80} is an array of arrays")
        code = _SCALARS.get(item)
        size = 8 if code is None else struct.calcsize("<" + code)
        length = self.count(f"length of {key!r:.80}", self._items_left, least_bytes=size)
        self._items_left -= length
        if code is None:
            return self._strings(key, length)
        return list(struct.unpack(f"<{length}{code}", self.take(length * size, key)))

    def _strings(self, key: str, length: int) -> list[str]:
        """As `string`, many times, in a third of the time: vocabularies have 10**5 of them."""
        buffer, at, limit = self._buffer, self.position, min(len(self._buffer), MAX_HEADER_BYTES)
        found: list[str] = []
        for _ in range(length):
            start = at + 8
            num_bytes = int.from_bytes(buffer[at:start], "little")
            end = start + num_bytes
            if num_bytes > MAX_STRING_BYTES or end > limit:
                break
            try:
                found.append(buffer[start:end].decode())
            except UnicodeDecodeError:
                break
            at = end
        self.position = at
        while len(found) < length:  # what stopped it is told by the slow way
            found.append(self.string(key))
        return found

    def _scalar_or_string(self, kind: GGUFValueType, key: str) -> Any:
        code = _SCALARS.get(kind)
        return self.string(key) if code is None else self.scalar(code)

    def _value_type(self, key: str) -> GGUFValueType:
        code = self.scalar("I")
        try:
            return GGUFValueType(code)
        except ValueError as error:
            raise self.error(f"metadata {key!r:.80} has unknown value type {code}") from error

    def tensor_info(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self.string("a tensor name")
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.error(f"tensor {name!r:.80} has {num_dims} dimensions (limit {MAX_DIMS})")
        dims: list[int] = [self.scalar("Q") for _ in range(num_dims)]
        if not all(1 <= size < 2**31 for size in dims):
            raise self.error(f"tensor {name!r:.80} has impossible dimensions {dims}")
        code = self.scalar("I")
        try:
            kind = GGMLQuantizationType(code)
        except ValueError as error:
            raise self.error(f"tensor {name!r:.80} has unknown type {code}") from error
        # The file names the contiguous dimension first.
        return name, kind, tuple(reversed(dims)), self.scalar("Q")
