"""What a model may be called. Knows no file and no store.

A model's id is name@digest, its name that of the file it was packed from. A name of the catalog
stands for the model whose file the catalog has under it.
"""

from __future__ import annotations

# Held against the catalog by tests/unit/test_model_names.py.
CATALOG_NAMES = {"smollm2-135m": "smollm2-135m-instruct.q4_1"}


def name_of(model_id: str) -> str:
    """The name in an id, without the digest."""
    return model_id.partition("@")[0]


def is_called(model_id: str, asked: str) -> bool:
    """Whether a model may be called so: by its id, its name, or its name in the catalog."""
    return CATALOG_NAMES.get(asked.lower(), asked) in (model_id, name_of(model_id))
