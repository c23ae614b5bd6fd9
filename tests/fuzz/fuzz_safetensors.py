"""Any bytes as a .safetensors file: tensors that can be read, or a ModelError."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from shared.errors import ModelError
from shared.formats.reading import read_float32
from shared.formats.safetensors_file import open_safetensors
from tests.safetensors_files import write_safetensors

FOLDER = tempfile.TemporaryDirectory(prefix="cellpipe-fuzz-")


def one_input(body: bytes) -> None:
    path = Path(FOLDER.name) / "input.safetensors"
    path.write_bytes(body)
    try:
        for tensor in open_safetensors(path).values():
            if tensor.num_bytes:
                read_float32(tensor, 0, tensor.num_rows)
    except ModelError:
        pass


def seeds() -> dict[str, bytes]:
    """Tensors of each type that is read, of one that is not, and a file without most of it."""
    values = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    path = Path(FOLDER.name) / "seed.safetensors"
    kinds = {"f32": "F32", "f16": "F16", "bf16": "BF16", "i64": "I64"}
    found = {
        name: write_safetensors(
            path, {"a.weight": (values, kind), "b": (values[0], kind)}
        ).read_bytes()
        for name, kind in kinds.items()
    }
    return found | {"truncated": found["bf16"][:100], "empty": b"\x02" + bytes(7) + b"{}"}
