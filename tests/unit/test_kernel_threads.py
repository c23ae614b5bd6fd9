"""Facts about the kernel's threads: they survive a fork, sleep when idle and are shared."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from shared.kernel.matrix import PackedMatrix
from tests.kernel_backends import native_or_skip
from tests.kernel_values import random_activations, random_matrix


@pytest.fixture(scope="module")
def product() -> tuple[PackedMatrix, np.ndarray, bytes]:
    from shared.kernel import native

    rng = np.random.default_rng(5)
    matrix = random_matrix(rng, "int4", 200, 6)
    x = random_activations(rng, 9, 6)
    return matrix, x, native.matmul(native_or_skip(), matrix, x).tobytes()


def test_a_forked_child_starts_threads_of_its_own(
    product: tuple[PackedMatrix, np.ndarray, bytes],
) -> None:
    backend = native_or_skip(num_threads=3)
    from shared.kernel import native

    matrix, x, want = product
    assert native.matmul(backend, matrix, x).tobytes() == want

    child = os.fork()
    if child == 0:
        same = native.matmul(backend, matrix, x).tobytes() == want
        num_threads = len(os.listdir("/proc/self/task"))
        os._exit(0 if same and num_threads == 3 else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert native.matmul(backend, matrix, x).tobytes() == want


def test_idle_threads_use_no_cpu(product: tuple[PackedMatrix, np.ndarray, bytes]) -> None:
    backend = native_or_skip(num_threads=3)
    from shared.kernel import native

    matrix, x, _ = product
    before = set(os.listdir("/proc/self/task"))
    native.matmul(backend, matrix, x)
    helpers = set(os.listdir("/proc/self/task")) - before
    assert len(helpers) == 2

    asleep_at = time.monotonic() + 10  # they spin for microseconds; a busy machine may delay them
    while {state(task) for task in helpers} != {"S"}:
        assert time.monotonic() < asleep_at


def state(task: str) -> str:
    """The scheduler's letter for a thread: S sleeps."""
    return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()[0]


def test_two_callers_at_once_get_the_same_bits(
    product: tuple[PackedMatrix, np.ndarray, bytes],
) -> None:
    backend = native_or_skip(num_threads=2)
    from shared.kernel import native

    matrix, x, want = product
    results: list[bool] = []

    def work() -> None:
        results.extend(native.matmul(backend, matrix, x).tobytes() == want for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == [True] * 600


def test_a_backend_that_goes_away_ends_its_threads(
    product: tuple[PackedMatrix, np.ndarray, bytes],
) -> None:
    backend = native_or_skip(num_threads=3)
    from shared.kernel import native

    matrix, x, _ = product
    before = set(os.listdir("/proc/self/task"))
    native.matmul(backend, matrix, x)
    helpers = set(os.listdir("/proc/self/task")) - before

    del backend

    assert helpers
    assert not helpers & set(os.listdir("/proc/self/task"))
