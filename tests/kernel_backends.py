"""Says which kernels the tests run on. Without a C compiler the native ones are skipped; in CI they
fail instead."""

from __future__ import annotations

import os

import pytest

from shared.errors import ConfigError
from shared.kernel.weights import KernelBackend
from shared.model.backend import BACKENDS, pick_backend
from shared.model.layer_group import LayerGroup
from tests.tiny_model import TinyModel


def backend_or_skip(name: str) -> KernelBackend:
    try:
        return pick_backend(name)
    except ConfigError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def require_native() -> None:
    backend_or_skip("native")


def load_group(model: TinyModel, backend_name: str, first: int = 0, end: int = 4) -> LayerGroup:
    """Layers first..end-1, with embedding and head when they are the model's first and last."""
    return LayerGroup.load(
        model.config,
        model.manifest,
        first,
        end,
        model.read_shard,
        first=first == 0,
        last=end == model.config.num_hidden_layers,
        backend=backend_or_skip(backend_name),
    )


every_backend = pytest.mark.parametrize("backend_name", BACKENDS)
