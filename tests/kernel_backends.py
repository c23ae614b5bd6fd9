"""Says which kernels the tests run on. Without a C compiler the native ones are skipped; in CI they
fail instead."""

from __future__ import annotations

import os

import pytest

from shared.errors import ConfigError
from shared.kernel.weights import KernelBackend
from shared.model.backend import BACKENDS, pick_backend


def backend_or_skip(name: str) -> KernelBackend:
    try:
        return pick_backend(name)
    except ConfigError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


def require_native() -> None:
    backend_or_skip("native")


every_backend = pytest.mark.parametrize("backend_name", BACKENDS)
