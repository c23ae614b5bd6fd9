"""The safetensors container: one file, or a folder of shards with an index, from untrusted bytes.

The `safetensors` package is not used: its NumPy side knows no bf16, and it says nothing of folders.
Every size is checked against the bytes that are there before anything is made from it, and a file
name of an index against the folder before anything is opened. Knows no architecture.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from shared.errors import ModelError
from shared.formats.stored_tensor import FILE_REMEDY, MappedFile, StoredTensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 16 << 20  # 160,000 tensors; the largest headers of real models have 2 MB
MAX_INDEX_BYTES = 64 << 20
MAX_TENSORS = 1 << 16  # of one file
MAX_DIMS = 8
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

# Bits of a value. What is not among `READ_TYPES` of `shared.formats.reading` may lie in a file, but
# no tensor of a model may be of it.
_TYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors\Z")


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """The weights of a Hugging Face folder: every tensor of every shard, by name."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    files: tuple[Path, ...]


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Parse one file's header and map its tensors, in the order in which they lie there.

    Raises `ModelError` for a file that is missing, something else, truncated, or at odds with
    itself.
    """
    file = MappedFile(path, "safetensors")
    size = len(file.content)
    if size < 8:
        raise _bad(path, f"it has {size} bytes")
    header_bytes = int.from_bytes(file.buffer[:8], "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise _bad(path, f"its header would have {header_bytes} bytes (limit {MAX_HEADER_BYTES})")
    data_start = 8 + header_bytes
    if data_start > size:
        raise _bad(path, f"its header ends at byte {data_start}, the file has {size}")
    header = _parse(path, file.buffer[8:data_start])
    header.pop("__metadata__", None)
    tensors = [_tensor(file, name, line, data_start) for name, line in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.num_bytes))
    end = data_start
    for tensor in tensors:
        if tensor.offset != end:
            what = "overlaps the one before it" if tensor.offset < end else "comes after a hole"
            raise _bad(path, f"tensor {tensor.name!r:.80} {what}, at byte {tensor.offset}")
        end += tensor.num_bytes
    if end != size:
        raise _bad(path, f"its tensors end at byte {end}, the file has {size}")
    return {tensor.name: tensor for tensor in tensors}


def open_folder(folder: Path) -> SafetensorsFolder:
    """All tensors of a folder: those of its index's shards, or of its only safetensors file.

    Raises `ModelError` that names what is missing, left over, listed outside the folder or of
    another format.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        return _open_indexed(folder, _read_index(index))
    file = _only_file(folder)
    return SafetensorsFolder(folder, open_safetensors(_inside(folder, file)), (folder / file,))


def shard_names(folder: Path) -> list[str]:
    """The files that a folder's index lists, each a plain name. Raises `ModelError` for others."""
    return sorted(set(_read_index(folder / INDEX_FILE).values()))


def _open_indexed(folder: Path, weight_map: dict[str, str]) -> SafetensorsFolder:
    names = sorted(set(weight_map.values()))
    paths = {name: _inside(folder, name) for name in names}
    if missing := [name for name, path in paths.items() if not path.is_file()]:
        raise ModelError(
            f"{folder.name} lacks {len(missing)} of {len(names)} shards: "
            + ", ".join(missing[:8])
            + (", …" if len(missing) > 8 else ""),
            remedy="fetch the missing files; `cellpipe pull hf:ORG/NAME` goes on where it stopped",
        )
    tensors: dict[str, StoredTensor] = {}
    for name, path in paths.items():
        for tensor in open_safetensors(path).values():
            listed = weight_map.get(tensor.name)
            if listed != name:
                raise _bad(
                    folder / name,
                    f"tensor {tensor.name!r:.80} is in it, the index says {listed or 'nothing'}",
                )
            tensors[tensor.name] = tensor
    if lost := next((name for name in weight_map if name not in tensors), None):
        raise _bad(folder / weight_map[lost], f"tensor {lost!r:.80} of the index is not in it")
    return SafetensorsFolder(folder, tensors, tuple(folder / name for name in names))


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, each of the latter a plain name."""
    try:
        size = path.stat().st_size
        if size > MAX_INDEX_BYTES:
            raise _bad(path, f"it has {size} bytes (limit {MAX_INDEX_BYTES})")
        index = _parse(path, path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}", remedy=FILE_REMEDY) from error
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(path, "it has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _SHARD_NAME.match(file):
            raise _bad(path, f"it puts tensor {name!r:.80} into {file!r:.80}, no file of its own")
    return weight_map


def _only_file(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}", remedy="check the path") from error
    found = [name for name in names if name.endswith(".safetensors")]
    if SINGLE_FILE in found:
        return SINGLE_FILE
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(
            f"{folder.name} has {len(found)} safetensors files and no {INDEX_FILE}",
            remedy="fetch the index too",
        )
    pickles = [name for name in names if name.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise ModelError(
            f"{folder.name} has no safetensors, only {pickles[0]}: a pickle, which can run code",
            remedy="fetch a revision with safetensors weights, or convert them",
        )
    raise ModelError(f"{folder.name} has no safetensors file", remedy="give a whole model folder")


def _inside(folder: Path, name: str) -> Path:
    """The file of that name, unless a link leads out of the folder.

    A snapshot in the hub's own cache is a folder of links to the `blobs` beside it: taken.
    """
    path = folder / name
    home = folder.resolve()
    real = path.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if real.parent not in allowed:
        raise ModelError(
            f"{name} in {folder.name} is a link that leads out of the folder",
            remedy="put the file itself into the folder",
        )
    return path


def _tensor(file: MappedFile, name: str, line: Any, data_start: int) -> StoredTensor:
    path = file.path
    if not isinstance(line, dict) or set(line) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor {name!r:.80} has another entry than dtype, shape, data_offsets")
    dtype, shape, offsets = line["dtype"], line["shape"], line["data_offsets"]
    bits = _TYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise _bad(path, f"tensor {name!r:.80} has unknown dtype {dtype!r:.40}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS:
        raise _bad(path, f"tensor {name!r:.80} has impossible shape {shape!r:.80}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, f"tensor {name!r:.80} has impossible data_offsets {offsets!r:.80}")
    start, end = offsets
    if data_start + end > len(file.content):
        raise _bad(
            path,
            f"tensor {name!r:.80} ends at byte {data_start + end}, the file has "
            f"{len(file.content)}: it is truncated",
        )
    num_bits = bits
    for size in shape:
        num_bits *= size
    if num_bits != 8 * (end - start):
        raise _bad(
            path,
            f"tensor {name!r:.80} of {dtype} {tuple(shape)} needs {-(-num_bits // 8)} bytes, "
            f"its data_offsets give {end - start}",
        )
    return StoredTensor(file, name, dtype, tuple(shape), data_start + start, end - start)


def _are_sizes(values: Any) -> bool:
    # type(), not isinstance: bool passes for int.
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**48 for v in values)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """A JSON object without a key that comes twice, of bounded parts."""
    # Counted before anything is made of it: each part costs far more memory than its bytes.
    if text.count(b"{") + text.count(b"[") > 3 * MAX_TENSORS + 16:
        raise _bad(path, f"its JSON has more parts than {MAX_TENSORS} tensors need")

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key comes twice")
        return found

    try:
        parsed = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"its JSON cannot be read: {error!s:.120}") from error
    if not isinstance(parsed, dict):
        raise _bad(path, f"its JSON is a {type(parsed).__name__}, not an object")
    return parsed


def _bad(path: Path, what: str) -> ModelError:
    return ModelError(f"{path.name} is not usable: {what}", remedy=FILE_REMEDY)
