"""One door to a model on disk, whatever its format. Knows no more of a format than its name."""

from __future__ import annotations

from pathlib import Path

from shared.errors import ModelError
from shared.formats.description import ModelDescription
from shared.formats.folder import folder_files, read_folder
from shared.formats.gguf import read_gguf


def read_model(path: Path) -> ModelDescription:
    """Describe a Hugging Face folder or a GGUF file.

    Raises `ModelError` naming what cannot be used.
    """
    if path.is_dir():
        return read_folder(path)
    if path.suffix.lower() == ".safetensors":
        raise ModelError(
            f"{path.name} holds weights alone", remedy=f"give its folder: {path.parent}"
        )
    return read_gguf(path)


def model_files(path: Path) -> list[Path]:
    """The files that `read_model` reads."""
    return folder_files(path) if path.is_dir() else [path]
