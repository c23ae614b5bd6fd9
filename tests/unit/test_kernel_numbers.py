"""Facts about single operations of the reference: it equals docs/arithmetic.md."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import KernelError
from shared.kernel import reference
from shared.kernel.matrix import PackedMatrix
from tests.kernel_values import F, random_activations, random_matrix, same_bits


def matmul_by_the_page(matrix: PackedMatrix, x: np.ndarray, terms: int) -> np.ndarray:
    """docs/arithmetic.md, one number at a time."""
    w = matrix.unpacked
    n = 127 if terms == 1 else 32258
    out = np.zeros((len(x), matrix.rows), F)
    for b, row in enumerate(x.reshape(len(x), -1, 32)):
        for r in range(matrix.rows):
            sum_a = sum_b = F(0)
            for g, values in enumerate(row):
                amax = np.abs(values).max()
                d, q = F(0), np.zeros(32, np.int64)
                if amax >= 2.0**-100:
                    d, inverse = amax / F(n), F(n) / amax
                    q = np.rint(values * inverse).clip(-n, n).astype(np.int64)
                first = (q + 127) // 254 if terms == 2 else 0 * q
                second = q - 254 * first
                assert max(abs(first).max(), abs(second).max()) <= 127
                weights = w.q[g, r].astype(np.int64)
                dot = 254 * int((weights * first).sum()) + int((weights * second).sum())
                sum_a = sum_a + (w.scale[g, r] * d) * F(dot)
                if w.min is not None:
                    sum_b = sum_b + w.min[g, r] * (d * F(int(q.sum())))
            out[b, r] = sum_a + sum_b if w.min is not None else sum_a
    return out


@given(
    kind=st.sampled_from(["int4", "int8"]),
    rows=st.integers(1, 20),
    groups=st.integers(1, 5),
    batch=st.integers(1, 3),
    terms=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_reference_matmul_equals_the_page(
    kind: str, rows: int, groups: int, batch: int, terms: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, kind, rows, groups)
    x = random_activations(rng, batch, groups)

    got = reference.matmul(matrix, reference.quantize_activations(x, terms))

    assert same_bits(got, matmul_by_the_page(matrix, x, terms))


def test_sum8_adds_in_lanes_and_then_in_a_tree() -> None:
    x = np.zeros(16, F)
    x[0], x[8], x[4] = 1e8, 1, -1e8  # lane 0 loses the 1 before lane 4 takes the rest away

    assert reference.sum8(x) == 0
    assert reference.sum8(x[::-1].copy()) == 0
    x[8], x[9] = 0, 1
    assert reference.sum8(x) == 1


def test_a_mean_square_that_overflows_is_an_error_and_not_zeros() -> None:
    x = np.ones((3, 8), F)
    x[1] = 1e30

    with pytest.raises(KernelError, match="row 1"):
        reference.rms_norm(x, np.ones(8, F), 1e-5)


@pytest.mark.parametrize("half_pairing", [False, True])
def test_rope_turns_each_pair_by_its_angle(half_pairing: bool) -> None:
    x = np.arange(1, 9, dtype=F).reshape(1, 1, 8)
    angles = np.array([[0.1, 0.2, 0.3, 0.4]])

    got = reference.rope(
        x, np.cos(angles).astype(F), np.sin(angles).astype(F), half_pairing=half_pairing
    )

    pairs = x.reshape(2, 4).T if half_pairing else x.reshape(4, 2)
    turned = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * angles[0])
    want = np.stack([turned.real, turned.imag])
    want = want.reshape(8) if half_pairing else want.T.reshape(8)
    np.testing.assert_allclose(got.reshape(8), want, rtol=1e-5)
