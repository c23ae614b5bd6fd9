"""Builds the C kernel: `python -m shared.kernel.build` in place, setup.py for an installation.

Without a C compiler the extension is left out and the NumPy reference computes, slower. Imports
nothing of cellpipe: setuptools runs this file before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from cffi import FFI

SOURCE_DIR = "shared/kernel/csrc"  # relative to the project root, as setuptools wants it
SOURCES = (
    "paths",
    "threads",
    "caches",
    "geometry",
    "matmul",
    "attention",
    "group",
    "ends",
    "measure",
    "rows",
    "block_portable",
    "rows_avx2",
    "rows_avx512",
    "attend_avx2",
    "attend_avx512",
    "block_avx2",
    "block_avx512",
    "pairs_avx512",
    "block_amx",
    "block_neon",
)
TARGET = "_native.abi3.so"  # as setuptools calls it: two names, and Python would take the older one
ROOT = Path(os.path.abspath(__file__)).parents[2]  # setuptools gives __file__ relative to the root

# No -ffast-math and no fused operations: docs/arithmetic.md promises bits. The two -fno- options
# change no value: they let sqrtf be one instruction and conditionals be vectorised.
COMPILE_ARGS = (
    "-std=c99",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-pthread",
)


def declarations() -> str:
    """The part of the C header that is meant for cffi."""
    header = (ROOT / SOURCE_DIR / "cellpipe.h").read_text(encoding="utf-8")
    found = re.search(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", header, re.DOTALL)
    assert found, "cellpipe.h lost its cffi marks"
    return found[1]


def make_builder(root: str = "") -> FFI:
    """The cffi builder of `shared.kernel._native`. `root` goes before the paths of the sources."""
    source_dir = os.path.join(root, SOURCE_DIR)
    builder = FFI()
    builder.cdef(declarations())
    builder.set_source(
        "shared.kernel._native",
        '#include "cellpipe.h"',
        sources=[f"{source_dir}/{name}.c" for name in SOURCES],
        depends=[f"{source_dir}/{path.name}" for path in (ROOT / SOURCE_DIR).glob("*.h")],
        include_dirs=[source_dir],
        extra_compile_args=list(COMPILE_ARGS),
        libraries=["m"],
        extra_link_args=["-pthread"],
        optional=True,  # an installation without a compiler succeeds
    )
    return builder


def build_in_place() -> Path:
    """Compile, put the module beside this file and return its path.

    The work is done in a temporary directory: distutils would read our pyproject.toml, which an old
    setuptools rejects, and leave its objects about.
    """
    with tempfile.TemporaryDirectory() as build_dir:
        built = Path(make_builder(str(ROOT)).compile(tmpdir=build_dir))
        target = ROOT / "shared" / "kernel" / TARGET
        partial = target.with_suffix(".partial")
        shutil.copyfile(built, partial)
        partial.replace(target)  # at once: a running worker keeps the file it has mapped
    return target


if __name__ == "__main__":
    sys.stdout.write(f"{build_in_place()}\n")
