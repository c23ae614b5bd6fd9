"""Says which kernels the tests run on. Without a C compiler the native ones are skipped; in CI they
fail instead."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import pytest

from shared.errors import ConfigError
from shared.kernel.names import NATIVE_PATHS, REFERENCE
from shared.kernel.weights import KernelBackend
from shared.model.backend import available_kernels, pick_backend
from shared.model.layer_group import LayerGroup
from tests.tiny_model import TinyModel

if TYPE_CHECKING:
    from shared.kernel.native import NativeBackend


# "native" stands for the path that "auto" takes where the kernel is built.
available = available_kernels()
native_paths = tuple(name for name in available if name != REFERENCE) or ("portable",)


def backend_or_skip(name: str, num_threads: int = 1) -> KernelBackend:
    try:
        return pick_backend(native_paths[0] if name == "native" else name, num_threads=num_threads)
    except ConfigError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def native_or_skip(name: str = "native", num_threads: int = 1) -> NativeBackend:
    backend = backend_or_skip(name, num_threads)
    assert backend.name in NATIVE_PATHS
    return cast("NativeBackend", backend)


def load_group(
    model: TinyModel, backend_name: str, first: int = 0, end: int = 4, *, num_threads: int = 1
) -> LayerGroup:
    """Layers first..end-1, with embedding and head when they are the model's first and last."""
    return LayerGroup.load(
        model.config,
        model.manifest,
        first,
        end,
        model.read_shard,
        first=first == 0,
        last=end == model.config.num_hidden_layers,
        backend=backend_or_skip(backend_name, num_threads),
    )


every_backend = pytest.mark.parametrize("backend_name", [*native_paths, REFERENCE])
every_path = pytest.mark.parametrize("path", native_paths)
