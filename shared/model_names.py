"""What a model may be called. Knows no file and no store.

A model's id is name@digest, its name that of the file it was packed from. A name of the catalog
stands for the model whose file the catalog has under it.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

MAX_NAME_CHARS = 48
HUB_SCHEME = "hf:"

# Held against the catalog by tests/unit/test_model_names.py.
CATALOG_NAMES = {"smollm2-135m": "smollm2-135m-instruct.q4_1"}


def name_of(model_id: str) -> str:
    """The name in an id, without the digest."""
    return model_id.partition("@")[0]


def short_name(source: str) -> str:
    """A file's name as queue names and keys can carry it: [a-z0-9._-], at most 48 characters."""
    stem = PurePosixPath(source).name.lower().removesuffix(".gguf")
    name = re.sub(r"[^a-z0-9._-]+", "-", stem).strip("-._")
    return name[:MAX_NAME_CHARS] or "model"


def is_called(model_id: str, asked: str) -> bool:
    """Whether a model may be called so: by its id, its name, its name in the catalog, or the
    `hf:ORG/NAME[@REVISION][:FILE.gguf]` it was pulled under."""
    if asked.startswith(HUB_SCHEME):
        repo, _, file = asked.removeprefix(HUB_SCHEME).partition(":")
        asked = short_name(file or repo.partition("@")[0])
    return CATALOG_NAMES.get(asked.lower(), asked) in (model_id, name_of(model_id))
