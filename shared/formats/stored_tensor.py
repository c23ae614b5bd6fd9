"""A model file's bytes, mapped, and one tensor in it. Knows no container's header and no model.

Pages that were read count as this process's memory until they are let go, so whoever reads a
tensor of gigabytes does it by row ranges, and each range is let go behind it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shared.errors import ModelError

FILE_REMEDY = "fetch the file again, or give another one"

# What people give in place of weights, by how it begins.
_OTHER_FILES = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes: pickle inside, which can run code"),
    (b"PK\x05\x06", "an empty zip archive"),
    *((bytes([0x80, protocol]), "a pickle, which can run code") for protocol in range(2, 6)),
    (b"version https://git-lfs", "a Git LFS pointer, not the file that it points to"),
    (b"<!DOCTYPE", "a web page"),
    (b"<html", "a web page"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"GGUF", "a GGUF file"),
)


class MappedFile:
    """A whole file, mapped read-only. `content` is uint8; its slices keep the mapping alive."""

    def __init__(self, path: Path, format_name: str) -> None:
        """Raises `ModelError` when the file is missing or empty, or obviously something else."""
        self.path = path
        if path.exists() and not path.is_file():  # a pipe would be waited for without end
            raise ModelError(f"{path} is no regular file", remedy=FILE_REMEDY)
        try:
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read: {error}", remedy=FILE_REMEDY) from error
        self.content: npt.NDArray[np.uint8] = np.frombuffer(self.buffer, dtype=np.uint8)
        head = self.buffer[:32]
        for magic, what in _OTHER_FILES:
            if head.startswith(magic) and magic.decode("latin-1") != format_name:
                raise ModelError(
                    f"{path.name} is no {format_name} file: it is {what}",
                    remedy="give safetensors or GGUF weights; no other kind is ever opened",
                )

    def release(self, start: int, end: int) -> None:
        """Let go of the whole pages in bytes start..end; they are read again when asked for."""
        if not hasattr(mmap, "MADV_DONTNEED"):
            return
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = len(self.content) if end == len(self.content) else end - end % mmap.PAGESIZE
        if last > first:
            self.buffer.madvise(mmap.MADV_DONTNEED, first, last - first)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file, unread. `shape` is outermost first, `type_name` the format's own word.

    Its bytes are `num_bytes` from `offset` on. A vector counts as one row.
    """

    file: MappedFile
    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def num_cols(self) -> int:
        return self.shape[-1] if self.shape else 1

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """All of its bytes, uint8 (num_bytes,), not copied."""
        return self.file.content[self.offset : self.offset + self.num_bytes]

    def row_bytes(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """The bytes of rows start..stop, uint8 (stop - start, bytes of a row), not copied."""
        if not 0 <= start < stop <= self.num_rows:
            raise ModelError(f"tensor {self.name} has {self.num_rows} rows, not {start}..{stop}")
        return self.raw.reshape(self.num_rows, -1)[start:stop]

    def release(self, start: int, stop: int) -> None:
        """Let go of the memory of rows start..stop, once what was made of them is a copy."""
        size = self.num_bytes // self.num_rows
        self.file.release(self.offset + start * size, self.offset + stop * size)
