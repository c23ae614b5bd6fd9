"""Writes small safetensors files and folders for tests, without the package that does so."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Stored = tuple[np.ndarray, str]
_DTYPES = {"F32": "<f4", "F16": "<f2", "I64": "<i8"}


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, NaN and infinity kept, uint16."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    is_finite = np.isfinite(values)
    return (np.where(is_finite, rounded, bits) >> 16).astype(np.uint16)


def write_safetensors(path: Path, tensors: Mapping[str, Stored]) -> Path:
    """Write (array, dtype) by name and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: dict[str, object] = {"__metadata__": {"format": "pt"}}
    pieces: list[bytes] = []
    end = 0
    for name, (values, dtype) in tensors.items():
        bits = bf16_bits(values) if dtype == "BF16" else values.astype(_DTYPES[dtype])
        piece = bits.tobytes()
        shape, offsets = list(values.shape), [end, end + len(piece)]
        lines[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        pieces.append(piece)
        end += len(piece)
    header = json.dumps(lines).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(pieces))
    return path


def write_sharded(folder: Path, shards: Sequence[Mapping[str, Stored]]) -> list[Path]:
    """Write shards with their index and return their paths."""
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    )
    return [
        write_safetensors(folder / file, shard) for file, shard in zip(names, shards, strict=True)
    ]
