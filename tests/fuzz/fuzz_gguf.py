"""Any bytes as a .gguf file: a description whose tensors can be read, or a ModelError."""

from __future__ import annotations

import tempfile
from pathlib import Path

from shared.errors import ModelError
from shared.formats.gguf import read_gguf
from tests.gguf_files import TinyModel, write_gguf

FOLDER = tempfile.TemporaryDirectory(prefix="cellpipe-fuzz-")
MAX_READ_VALUES = 1 << 20


def one_input(body: bytes) -> None:
    path = Path(FOLDER.name) / "input.gguf"
    path.write_bytes(body)
    try:
        description = read_gguf(path)
        for tensor in description.tensors.values():
            if tensor.rows * tensor.cols <= MAX_READ_VALUES:
                tensor.read()
    except ModelError:
        pass


def seeds() -> dict[str, bytes]:
    """Small models, whole, and one without most of its bytes."""
    path = Path(FOLDER.name) / "seed.gguf"
    models = {
        "q4_1": TinyModel(hidden=32, inner=32, layers=1, heads=2, kv_heads=1),
        "q8_0": TinyModel(hidden=32, inner=32, layers=1, heads=2, kv_heads=1, matrix_type="Q8_0"),
    }
    found = {name: write_gguf(path, model).read_bytes() for name, model in models.items()}
    return found | {"truncated": found["q4_1"][:4096]}
