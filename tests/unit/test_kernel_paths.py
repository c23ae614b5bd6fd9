"""Facts about the C kernel: on every instruction set, with any number of threads, its single
operations equal the reference bit for bit."""

from __future__ import annotations

import ctypes
import platform
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import ConfigError, KernelError
from shared.kernel import reference
from shared.kernel.matrix import PackedMatrix
from shared.kernel.names import NATIVE_PATHS
from shared.model.backend import available_kernels, pick_backend
from shared.quant.pack import pack_int4, pack_int8
from tests.kernel_backends import every_path, native_or_skip
from tests.kernel_values import F, random_activations, random_matrix, same_bits


@every_path
@given(
    kind=st.sampled_from(["int4", "int8"]),
    rows=st.integers(1, 100),
    groups=st.integers(1, 20),
    batch=st.integers(1, 35) | st.integers(47, 66),  # tiles are for larger ones
    terms=st.integers(1, 2),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_matmul_equals_the_reference(
    path: str, kind: str, rows: int, groups: int, batch: int, terms: int, threads: int, seed: int
) -> None:
    backend = native_or_skip(path, threads)
    from shared.kernel import native

    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, kind, rows, groups)
    x = random_activations(rng, batch, groups)

    want = reference.matmul(matrix, reference.quantize_activations(x, terms))

    assert same_bits(native.matmul(backend, matrix, x, terms), want)


@every_path
def test_every_activation_of_two_terms_is_told_apart(path: str) -> None:
    backend = native_or_skip(path)
    from shared.kernel import native

    ones = np.zeros((32, 1, 32), np.int8)
    ones[np.arange(32), 0, np.arange(32)] = 1  # output r is activation r
    packed = pack_int8(np.ones((32, 1), np.float16), ones, 16)
    matrix = PackedMatrix("int8", 32, 32, 16, packed)
    whole = np.arange(-32258, 32259, dtype=F)
    x = np.concatenate([whole, np.zeros(-len(whole) % 31, F)]).reshape(-1, 31)
    x = np.concatenate([x, np.full((len(x), 1), 32258, F)], axis=1)  # so that d is 1

    got = native.matmul(backend, matrix, x, terms=2)

    assert same_bits(got, x)


@every_path
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("terms", "steps"), [(1, 127), (2, 32258)])
def test_saturated_products_do_not_overflow(
    path: str, kind: str, sign: int, terms: int, steps: int
) -> None:
    backend = native_or_skip(path)
    from shared.kernel import native

    ones = np.ones((16, 2), F).astype(np.float16)
    if kind == "int4":
        packed = pack_int4(ones, 0 * ones, np.full((16, 2, 16), 255, np.uint8), 16)
    else:
        packed = pack_int8(ones, np.full((16, 2, 32), -128, np.int8), 16)
    matrix = PackedMatrix(kind, 16, 64, 16, packed)
    x = np.full((17, 64), sign * steps, F)  # a full tile and one row more

    got = native.matmul(backend, matrix, x, terms)

    assert (got == sign * 64 * steps * (15 if kind == "int4" else -128)).all()


@every_path
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_activations_that_are_not_finite_are_refused_with_their_row(path: str, bad: float) -> None:
    backend = native_or_skip(path)
    from shared.kernel import native

    matrix = random_matrix(np.random.default_rng(0), "int4", 16, 2)
    x = np.ones((4, 64), F)
    x[2, 40] = bad

    with pytest.raises(KernelError, match="row 2"):
        reference.quantize_activations(x)
    with pytest.raises(KernelError, match="row 2"):
        native.matmul(backend, matrix, x)


@every_path
def test_half_precision_equals_the_reference_for_every_half(path: str) -> None:
    backend = native_or_skip(path)
    from shared.kernel import native

    bits = np.arange(65536, dtype=np.uint16)
    bits = bits[(bits & 0x7C00) != 0x7C00]  # finite

    wide = native.from_half(backend, bits)

    assert same_bits(wide, reference.from_half(bits))
    assert same_bits(native.to_half(backend, wide), bits)


@every_path
def test_rounding_to_half_equals_the_reference_at_ties_and_beyond_the_range(path: str) -> None:
    backend = native_or_skip(path)
    from shared.kernel import native

    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(F)
    ties = (halves[:-1] + halves[1:]) / 2
    near = np.concatenate([np.nextafter(ties, F(0)), ties, np.nextafter(ties, F(np.inf))])
    rng = np.random.default_rng(1)
    anything = rng.integers(0, 2**32, 100_000).astype(np.uint32).view(F)
    x = np.concatenate([near, F([65504, 65519, 65520, 1e38, np.inf]), anything])
    x = x[~np.isnan(x)]
    x = np.concatenate([x, -x])

    got = native.to_half(backend, x)

    assert same_bits(got, reference.to_half(x))
    assert not ((got & 0x7C00) == 0x7C00).any()


@every_path
def test_exp_equals_the_reference_and_is_close_to_the_truth(path: str) -> None:
    backend = native_or_skip(path)
    from shared.kernel import native

    rng = np.random.default_rng(2)
    spread = rng.uniform(-90, 90, 100_000).astype(F)
    anything = rng.integers(0, 2**32, 100_000).astype(np.uint32).view(F)
    edges = F([0, -0.0, -87, 88, -87.00001, 89, 1e-45, -1e-45, 1e38, -1e38])
    x = np.concatenate([spread, anything[np.isfinite(anything)], edges])

    got = native.exp(backend, x)

    assert same_bits(got, reference.exp(x))
    truth = np.exp(x.clip(-87, 88).astype(np.float64))
    assert np.abs(got / truth - 1).max() < 3e-7  # the polynomial ends there
    assert (reference.exp(F([0, -0.0])) == 1).all()


@every_path
@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="sets glibc's MXCSR"
)
def test_a_host_that_flushes_subnormals_changes_nothing_and_keeps_its_mode(path: str) -> None:
    backend = native_or_skip(path)
    from shared.kernel import native

    tiny = np.full((16, 1), 2.0**-24, np.float16)
    packed = pack_int8(tiny, np.full((16, 1, 32), 100, np.int8), 16)
    matrix = PackedMatrix("int8", 16, 32, 16, packed)
    x = np.full((1, 32), 2.0**-99, F)
    want = reference.matmul(matrix, reference.quantize_activations(x))
    libm = ctypes.CDLL("libm.so.6")
    saved, flushing, after = (ctypes.create_string_buffer(32) for _ in range(3))
    libm.fegetenv(saved)
    libm.fegetenv(flushing)
    mxcsr = int.from_bytes(flushing.raw[28:32], "little") | 0x8040
    flushing[28:32] = mxcsr.to_bytes(4, "little")

    libm.fesetenv(flushing)
    try:
        got = native.matmul(backend, matrix, x)
        libm.fegetenv(after)
    finally:
        libm.fesetenv(saved)

    assert (want != 0).all()
    assert same_bits(got, want)
    assert int.from_bytes(after.raw[28:32], "little") & 0x8040 == 0x8040


def test_a_path_that_this_machine_lacks_is_refused_with_what_it_has() -> None:
    lacking = [name for name in NATIVE_PATHS if name not in available_kernels()]
    assert lacking, "no CPU has both AVX and NEON"

    with pytest.raises(ConfigError, match=f"kernel {lacking[0]} is not available.*reference"):
        pick_backend(lacking[0])
