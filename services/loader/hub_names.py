"""What a name `hf:ORG/NAME[@REVISION][:FILE.gguf]` asks for, and which of a repository's files.

Decides; fetches nothing. Files are taken by what they are, never by what a repository offers:
weights as safetensors or GGUF, and the texts around them. Anything that runs code when it is opened
(pickles) or imported (Python) stays where it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from shared.errors import ModelError
from shared.formats.safetensors_file import INDEX_FILE, PICKLE_SUFFIXES, SINGLE_FILE
from shared.model_names import HUB_SCHEME

SCHEME = HUB_SCHEME
DEFAULT_REVISION = "main"
NAME_REMEDY = "give hf:ORG/NAME, hf:ORG/NAME@REVISION or hf:ORG/NAME:FILE.gguf"

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(
    rf"hf:(?P<org>{_PART})/(?P<name>{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]{{0,127}}))?"
    rf"(?::(?P<file>(?:{_PART}/){{0,4}}{_PART}\.gguf))?\Z"
)
_TEXT_SUFFIXES = (".json", ".jinja", ".tiktoken")
_TEXT_FILES = ("tokenizer.model", "tiktoken.model", "merges.txt", "vocab.txt")
MAX_TEXT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed name. `file` is the path of one GGUF file, None for a whole model folder."""

    org: str
    name: str
    revision: str
    file: str | None

    @property
    def repo(self) -> str:
        return f"{self.org}/{self.name}"

    def __str__(self) -> str:
        at = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        return f"{SCHEME}{self.repo}{at}" + (f":{self.file}" if self.file else "")


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file as the hub lists it. `sha256` of large files, of the others git's `blob_sha1`."""

    path: str
    num_bytes: int
    sha256: str | None
    blob_sha1: str | None


@dataclass(frozen=True, slots=True)
class HubListing:
    """A repository at one commit."""

    commit: str
    files: Mapping[str, HubFile]


def parse_hub_name(text: str) -> HubName:
    """Raises `ModelError` for anything but hf:ORG/NAME[@REVISION][:FILE.gguf]."""
    match = _NAME.match(text)
    revision = match and (match["revision"] or DEFAULT_REVISION)
    if not match or not revision or ".." in text or "//" in text:
        raise ModelError(f"{text!r:.200} names no model of the hub", remedy=NAME_REMEDY)
    return HubName(match["org"], match["name"], revision, match["file"])


def text_files(listing: HubListing) -> list[HubFile]:
    """The config, tokenizer and template files of a model folder, and its index."""
    return [
        file
        for path, file in sorted(listing.files.items())
        if "/" not in path
        and (path.endswith(_TEXT_SUFFIXES) or path in _TEXT_FILES)
        and not any(suffix + "." in path for suffix in PICKLE_SUFFIXES)  # their indexes
        and file.num_bytes <= MAX_TEXT_BYTES
    ]


def weight_files(name: HubName, listing: HubListing, shards: Sequence[str] | None) -> list[HubFile]:
    """The safetensors files of a model folder: the `shards` of its index, or its only file.

    Raises `ModelError` that says what the repository has instead.
    """
    files = listing.files
    if shards is not None:
        if missing := [shard for shard in shards if shard not in files]:
            raise ModelError(
                f"{name} lacks {missing[0]}, which its {INDEX_FILE} lists",
                remedy="the repository is incomplete; give another revision",
            )
        return [files[shard] for shard in shards]
    found = [path for path in files if path.endswith(".safetensors") and "/" not in path]
    if SINGLE_FILE in found:
        return [files[SINGLE_FILE]]
    if len(found) == 1:
        return [files[found[0]]]
    if found:
        raise ModelError(
            f"{name} has {len(found)} safetensors files and no {INDEX_FILE}",
            remedy="give another revision or repository",
        )
    if ggufs := gguf_paths(listing):
        raise ModelError(
            f"{name} has no safetensors, but GGUF files: {_some(ggufs)}",
            remedy=f"say which one: {SCHEME}{name.repo}:{ggufs[0]}",
        )
    pickles = [path for path in files if path.endswith(PICKLE_SUFFIXES)]
    if pickles:
        raise ModelError(
            f"{name} has no safetensors, only {_some(sorted(pickles))}: pickles, which can run "
            "code, are never fetched",
            remedy="give a repository or revision with safetensors or GGUF files",
        )
    raise ModelError(f"{name} has no weights", remedy="give a model repository")


def gguf_file(name: HubName, listing: HubListing) -> HubFile:
    """The one file that a name asks for. Raises `ModelError` that lists those there are."""
    assert name.file is not None
    file = listing.files.get(name.file)
    if file is None:
        there = gguf_paths(listing)
        raise ModelError(
            f"{name.repo} has no {name.file}; "
            + (f"it has {_some(there)}" if there else "no GGUF"),
            remedy=NAME_REMEDY,
        )
    return file


def gguf_paths(listing: HubListing) -> list[str]:
    return sorted(path for path in listing.files if path.endswith(".gguf"))


def local_name(file: HubFile) -> str:
    """What a fetched file is called in its folder."""
    return PurePosixPath(file.path).name


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:6]) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")
