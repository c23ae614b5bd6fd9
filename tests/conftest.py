"""Fixtures that every kind of test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.loader.pull import default_cache_dir, resolve_model
from shared.errors import ModelError


@pytest.fixture(scope="session")
def real_model_path() -> Path:
    """SmolLM2-135M-Instruct in the user's cache, pulled if need be.

    Without a network its tests are skipped on a developer's machine; in CI they fail.
    """
    folder = os.environ.get("CELLPIPE_CACHE_DIR")
    try:
        return resolve_model("smollm2-135m", Path(folder) if folder else default_cache_dir())
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the real model cannot be pulled: {error}")
