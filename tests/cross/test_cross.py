"""The kernel's C source elsewhere: cross-compiled for other CPUs and run under qemu, and under the
sanitizers here, it gives the reference's bits on golden vectors.

Compilers and qemu are Debian packages; where this user may, they are installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.kernel.build import COMPILE_ARGS, ROOT, SOURCE_DIR, SOURCES
from tests.cross.vectors import write_vectors


@dataclass(frozen=True)
class Target:
    compiler: str
    flags: tuple[str, ...]
    runner: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    num_paths: int = 1  # at least


TARGETS = {
    "big-endian ppc64": Target(
        "powerpc64-linux-gnu-gcc",
        ("-static",),
        ("qemu-ppc64",),
        ("gcc-powerpc64-linux-gnu", "libc6-dev-ppc64-cross", "qemu-user"),
    ),
    "aarch64": Target(
        "aarch64-linux-gnu-gcc",
        ("-static",),
        ("qemu-aarch64",),
        ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"),
        num_paths=2,
    ),
    "here, looking for bad memory": Target(
        "gcc", ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    ),
    "here, looking for races": Target("gcc", ("-O1", "-g", "-fsanitize=thread")),
}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vectors") / "vectors.bin"
    write_vectors(path)
    return path


def have_tools(target: Target) -> bool:
    return all(shutil.which(tool) for tool in (target.compiler, *target.runner[:1]))


def require_tools(target: Target) -> None:
    """Install what is missing where that is allowed; skip outside CI where it is not."""
    if have_tools(target):
        return
    in_ci = bool(os.environ.get("CI"))
    allowed = in_ci or os.environ.get("CELLPIPE_ALLOW_INSTALL")
    if target.packages and allowed and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update"], ["install", "-y", "--no-install-recommends", *target.packages]):
            subprocess.run(["apt-get", "-q", *words], env=environment, check=False, timeout=280)
    if not have_tools(target):
        message = f"{target.compiler} or its emulator is missing"
        pytest.fail(message) if in_ci else pytest.skip(message)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
def test_the_kernel_gives_the_same_bits_elsewhere(name: str, vectors: Path, tmp_path: Path) -> None:
    target = TARGETS[name]
    require_tools(target)
    sources = [str(ROOT / SOURCE_DIR / f"{source}.c") for source in SOURCES]
    driver = tmp_path / "driver"
    words = [target.compiler, *COMPILE_ARGS, *target.flags, "-Wall", "-Wextra", "-Werror"]
    words += ["-I", str(ROOT / SOURCE_DIR), str(Path(__file__).with_name("driver.c")), *sources]

    subprocess.run([*words, "-o", str(driver), "-lm"], check=True, timeout=280)
    result = subprocess.run(
        [*target.runner, str(driver), str(vectors)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},  # the driver frees nothing
        timeout=280,
    )

    print(result.stdout, result.stderr)
    assert result.returncode == 0
    assert result.stdout.endswith("0 differ\n")
    paths = {line.split()[1] for line in result.stdout.splitlines() if line.startswith("path")}
    assert len(paths) >= target.num_paths
