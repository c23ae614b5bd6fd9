"""Chooses who computes: a path of the C kernel, or the NumPy reference that defines its bits."""

from __future__ import annotations

from shared.errors import ConfigError
from shared.kernel.names import AUTO, KERNELS, NATIVE_PATHS, REFERENCE
from shared.kernel.weights import KernelBackend
from shared.model.forward import ReferenceBackend


def available_kernels() -> tuple[str, ...]:
    """What this build and this CPU can compute with, fastest first; the reference is the last."""
    try:
        from shared.kernel.native import has_path
    except ImportError:
        return (REFERENCE,)
    return (*(name for name in NATIVE_PATHS if has_path(name)), REFERENCE)


def pick_backend(name: str = AUTO, *, num_threads: int = 1) -> KernelBackend:
    """The backend of that name; "auto" is the fastest one. All give the same bits.

    Raises `ConfigError` for an unknown name, for one that this build or CPU lacks, and for fewer
    than one thread. The reference runs on as many threads as NumPy likes.
    """
    if name not in KERNELS:
        raise ConfigError(f"kernel must be one of {', '.join(KERNELS)}, got {name!r}")
    if num_threads < 1:
        raise ConfigError(f"threads must be at least 1, got {num_threads}")
    available = available_kernels()
    if name == AUTO:
        name = available[0]
    if name not in available:
        raise ConfigError(
            f"kernel {name} is not available here; this machine has {', '.join(available)}",
            remedy="install a C compiler and build the kernel: python -m shared.kernel.build"
            if available == (REFERENCE,)
            else "choose another, or auto",
        )
    if name == REFERENCE:
        return ReferenceBackend()
    from shared.kernel.native import NativeBackend

    return NativeBackend(name, num_threads)
