"""Any bytes as a packed matrix: refused, or multiplied by the C kernel as by the reference."""

from __future__ import annotations

import struct
import warnings

import numpy as np

from shared.errors import KernelError
from shared.kernel import native, reference
from shared.kernel.chunks import aligned_zeros, matrix_bytes
from shared.kernel.matrix import PackedMatrix
from shared.model.backend import pick_backend
from tests.kernel_values import random_matrix

HEADER = struct.Struct("<BBqqq")  # kind and flags, batch rows, rows, cols, chunk rows
KINDS = ("int4", "int8", "f32", "int2")
MAX_BYTES = 1 << 16
BACKEND = pick_backend()


def one_input(body: bytes) -> None:
    if len(body) < HEADER.size:
        return
    kind_code, batch, rows, cols, chunk_rows = HEADER.unpack_from(body)
    kind = KINDS[kind_code % 4]
    content = body[HEADER.size :]
    try:
        if kind_code & 4:  # of exactly the bytes that it needs, or few inputs would come further
            wanted = matrix_bytes(kind, rows, cols, chunk_rows)
            if not 0 < wanted <= MAX_BYTES or not content:
                return
            content = (content * (wanted // len(content) + 1))[:wanted]
        packed = aligned_zeros(len(content))
        packed[:] = np.frombuffer(content, np.uint8)
        matrix = PackedMatrix(kind, rows, cols, chunk_rows, packed)
    except KernelError:
        return
    x = np.linspace(-2, 2, (batch % 8) * matrix.cols, dtype=np.float32).reshape(-1, matrix.cols)
    got = _outcome(lambda: native.matmul(BACKEND, matrix, x, 1 + (kind_code >> 7)))
    if len(x) and kind != "f32":
        want = _outcome(
            lambda: reference.matmul(
                matrix, reference.quantize_activations(x, 1 + (kind_code >> 7))
            )
        )
        assert got == want, "the C kernel and the reference differ"
    else:
        assert got is None


def _outcome(multiply) -> bytes | None:  # type: ignore[no-untyped-def]
    """The bits, None when it was refused or is not finite."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = multiply()
    except KernelError:
        return None
    return bytes(out.tobytes()) if np.isfinite(out).all() else None


def seeds() -> dict[str, bytes]:
    rng = np.random.default_rng(3)
    found = {}
    for code, kind in enumerate(KINDS[:2]):
        for rows, groups in ((16, 1), (40, 2)):
            matrix = random_matrix(rng, kind, rows, groups)
            sizes = (rows, 32 * groups, matrix.chunk_rows)
            header = HEADER.pack(code, 2, *sizes)
            found[f"{kind}.{rows}"] = header + matrix.data.tobytes()
            found[f"{kind}.{rows}.tiled"] = HEADER.pack(code | 4, 3, *sizes) + b"\x00\x20\x11" * 5
    found["f32"] = HEADER.pack(2, 1, 2, 32, 0) + bytes(256)
    return found
