"""Chooses who computes: the C kernel, or the NumPy reference that defines its bits."""

from __future__ import annotations

from shared.errors import ConfigError
from shared.kernel.weights import KernelBackend
from shared.model.forward import ReferenceBackend

BACKENDS = ("native", "reference")


def pick_backend(name: str | None = None) -> KernelBackend:
    """The backend of that name; without a name the C kernel if it was built, else the reference.

    Raises `ConfigError` for an unknown name, or for "native" where it was not built. Both give the
    same bits; the caller warns when it gets the slower one.
    """
    if name not in (None, *BACKENDS):
        raise ConfigError(f"kernel must be one of {', '.join(BACKENDS)}, got {name!r}")
    if name == "reference":
        return ReferenceBackend()
    try:
        from shared.kernel.native import NativeBackend
    except ImportError as error:
        if name is None:
            return ReferenceBackend()
        raise ConfigError(
            f"kernel native is not available here: {error}",
            remedy="install a C compiler and build it: python -m shared.kernel.build",
        ) from error
    return NativeBackend()
