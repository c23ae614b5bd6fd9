"""The names of the kernel's implementations, fastest first. Imports nothing, computes nothing."""

from __future__ import annotations

# Each an instruction set that csrc has code for; a CPU has some of them, and always "portable".
NATIVE_PATHS = ("amx", "avx512vnni", "avx2", "neon", "portable")
REFERENCE = "reference"
AUTO = "auto"
KERNELS = (AUTO, *NATIVE_PATHS, REFERENCE)
