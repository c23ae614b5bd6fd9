"""Calls the C kernel: builds its structs, gives it memory, turns its codes into errors.

One call runs a whole layer group for a whole batch, with the GIL released. Importing this module
raises ImportError when the kernel was not built (python -m shared.kernel.build). Longer than other
modules: every function of C that Python calls is called here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.errors import KernelError
from shared.kernel._native import ffi, lib
from shared.kernel.arrays import (
    FLOAT32,
    INT32,
    OPTIONAL_VECTORS,
    UINT16,
    check_array,
    check_slices,
    check_weights,
)
from shared.kernel.chunks import aligned_zeros
from shared.kernel.matrix import Float32, PackedMatrix
from shared.kernel.weights import GroupWeights, Logits, PagedSlice

_KINDS = {"f32": lib.CP_KIND_F32, "int4": lib.CP_KIND_INT4, "int8": lib.CP_KIND_INT8}
_PATHS = {
    "portable": lib.CP_PORTABLE,
    "avx2": lib.CP_AVX2,
    "amx": lib.CP_AMX_BF16,
    "avx512vnni": lib.CP_AVX512VNNI,
    "neon": lib.CP_NEON_DOT,
}
_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
_MEANINGS = {
    lib.CP_BAD_SIZE: "sizes disagree",
    lib.CP_NOT_FINITE: "a value is not finite",
    lib.CP_BAD_POSITION: "a position lies outside the rope tables or the KV pages",
    lib.CP_BAD_TOKEN: "a token id lies outside the vocabulary",
    lib.CP_BAD_SCRATCH: "the scratch memory is too small",
}


def has_path(name: str) -> bool:
    """Whether this build and this CPU have an instruction set (a name of `NATIVE_PATHS`)."""
    return bool(lib.cp_has_path(_PATHS[name]))


class NativeBackend:
    """The C kernel on one instruction set and `num_threads` threads, this one among them.

    The threads start when they are first used. They belong to one call at a time: when two threads
    of Python compute at once, one of them computes alone.
    """

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self.name = name
        self.num_threads = num_threads
        engine = lib.cp_engine_new(_PATHS[name], num_threads)
        if engine == ffi.NULL:
            raise KernelError(f"kernel {name} with {num_threads} threads cannot be made here")
        self.engine = ffi.gc(engine, lib.cp_engine_free)

    def bind(self, weights: GroupWeights) -> NativeGroup:
        return NativeGroup(weights, self.engine)


class NativeGroup:
    """A layer group as the C kernel sees it. Not thread-safe: it keeps its scratch memory.

    Everything raises `KernelError` for arrays of another type, shape or layout.
    """

    def __init__(self, weights: GroupWeights, engine: Any) -> None:
        check_weights(weights)
        self._engine = engine
        self._weights = weights  # the C structs point into its arrays
        self._fault = ffi.new("cp_fault *")
        self._scratch = aligned_zeros(0)
        self._layers = ffi.new("cp_layer[]", len(weights.layers))
        for c_layer, layer in zip(self._layers, weights.layers, strict=True):
            c_layer.input_norm = _floats(layer.input_norm)
            c_layer.post_norm = _floats(layer.post_norm)
            for name in _MATRICES:
                _fill_matrix(getattr(c_layer, name), getattr(layer, name))
            for name in OPTIONAL_VECTORS:
                if (vector := getattr(layer, name)) is not None:
                    setattr(c_layer, name, _floats(vector))
            if layer.rope is not None:
                c_layer.rope_cos, c_layer.rope_sin = (
                    _floats(layer.rope.cos),
                    _floats(layer.rope.sin),
                )
            c_layer.window = layer.window
        self._group = self._make_group()
        self._embedding = _matrix_or_none(weights.embedding)
        self._head = _matrix_or_none(weights.head)

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        matrix = self._weights.embedding
        assert matrix is not None, "this group has no embedding"
        check_array("token ids", token_ids, INT32, (None,))
        out = np.empty((len(token_ids), matrix.cols), np.float32)
        ids = ffi.from_buffer("int32_t[]", token_ids)
        scale = self._weights.shape.embedding_scale
        self._check(
            lib.cp_embed(self._embedding, ids, len(token_ids), scale, _floats(out), self._fault)
        )
        return out

    def forward(self, hidden: Float32, slices: Sequence[PagedSlice]) -> None:
        shape = self._weights.shape
        check_array("hidden", hidden, FLOAT32, (None, shape.hidden_size), written=True)
        check_slices(shape, len(self._weights.layers), slices)
        sequences = ffi.new("cp_sequence[]", len(slices))
        for sequence, part in zip(sequences, slices, strict=True):
            sequence.start_position = part.start_position
            sequence.num_rows = part.num_rows
            sequence.num_pages = len(part.addresses)
            sequence.pages = ffi.cast("uint16_t *const *", ffi.from_buffer(part.addresses))
        scratch, size = self._scratch_of(
            lib.cp_forward_scratch(self._engine, self._group, len(hidden))
        )
        self._check(
            lib.cp_forward(
                self._engine,
                self._group,
                sequences,
                len(slices),
                _floats(hidden),
                len(hidden),
                scratch,
                size,
                self._fault,
            )
        )

    def head(self, hidden_rows: Float32) -> Logits:
        weights = self._weights
        assert weights.head is not None, "this group has no head"
        assert weights.final_norm is not None
        check_array("hidden rows", hidden_rows, FLOAT32, (None, weights.head.cols))
        num_rows = len(hidden_rows)
        out = np.empty((num_rows, weights.head.rows), np.float32)
        largest = ffi.new("int32_t[]", num_rows)
        scratch, size = self._scratch_of(lib.cp_logits_scratch(self._engine, self._head, num_rows))
        self._check(
            lib.cp_logits(
                self._engine,
                self._head,
                _floats(weights.final_norm),
                weights.shape.norm_eps,
                weights.shape.logit_softcap,
                _floats(hidden_rows),
                num_rows,
                _floats(out),
                largest,
                scratch,
                size,
                self._fault,
            )
        )
        return Logits(out, list(largest))

    def _make_group(self) -> Any:
        weights, shape = self._weights, self._weights.shape
        return ffi.new(
            "cp_group *",
            {
                "hidden_size": shape.hidden_size,
                "intermediate_size": shape.intermediate_size,
                "num_heads": shape.num_heads,
                "num_kv_heads": shape.num_kv_heads,
                "head_dim": shape.head_dim,
                "half_pairing": shape.half_pairing,
                "num_positions": shape.num_positions,
                "num_layers": len(weights.layers),
                "norm_eps": shape.norm_eps,
                "score_scale": shape.score_scale,
                "score_softcap": shape.score_softcap,
                "gelu_tanh": shape.gelu_tanh,
                "layers": self._layers,
            },
        )

    def _scratch_of(self, num_bytes: int) -> tuple[Any, int]:
        if num_bytes > self._scratch.nbytes:
            self._scratch = aligned_zeros(num_bytes)
        return ffi.from_buffer("uint8_t[]", self._scratch), self._scratch.nbytes

    def _check(self, code: int) -> None:
        _raise_for(code, self._fault)


def matmul(backend: NativeBackend, matrix: PackedMatrix, x: Float32, terms: int = 1) -> Float32:
    """(R, C) -> (R, rows) by the C kernel, with its own quantisation of x to 1 or 2 terms."""
    return BoundMatmul(backend, matrix, x, terms)()


class BoundMatmul:
    """One product with everything at hand, to be called again and again."""

    def __init__(
        self, backend: NativeBackend, matrix: PackedMatrix, x: Float32, terms: int
    ) -> None:
        check_array("x", x, FLOAT32, (None, matrix.cols))
        if matrix.kind == "f32":
            raise KernelError("a matrix of kind f32 is for look-up only")
        self._x = x
        self._out = np.empty((len(x), matrix.rows), np.float32)
        self._fault = ffi.new("cp_fault *")
        self._keep = (backend, matrix, c_matrix := _matrix_or_none(matrix))
        scratch = aligned_zeros(lib.cp_matmul_scratch(backend.engine, c_matrix, len(x)))
        self._arguments = (
            backend.engine,
            c_matrix,
            _floats(self._x),
            len(x),
            terms,
            _floats(self._out),
            ffi.from_buffer("uint8_t[]", scratch),
            scratch.nbytes,
            self._fault,
        )

    def __call__(self) -> Float32:
        _raise_for(lib.cp_matmul(*self._arguments), self._fault)
        return self._out


def exp(backend: NativeBackend, x: Float32) -> Float32:
    """The C kernel's exp of a flat array."""
    check_array("x", x, FLOAT32, (None,))
    out = np.empty_like(x)
    lib.cp_exp(backend.engine, _floats(x), _floats(out), x.size)
    return out


def gelu_mul(backend: NativeBackend, gate: Float32, up: Float32) -> Float32:
    """The C kernel's gelu_tanh(gate) * up of flat arrays, a multiple of 32 long."""
    check_array("gate", gate, FLOAT32, (None,))
    check_array("up", up, FLOAT32, gate.shape)
    if gate.size % 32:
        raise KernelError(f"gate must have a multiple of 32 values, got {gate.size}")
    out = gate.copy()
    lib.cp_gelu_mul(backend.engine, _floats(out), _floats(up), out.size)
    return out


def softcap(x: Float32, cap: float) -> Float32:
    """The C kernel's cap * tanh(x / cap) of a flat array."""
    check_array("x", x, FLOAT32, (None,))
    out = x.copy()
    lib.cp_softcap(_floats(out), cap, out.size)
    return out


def to_half(backend: NativeBackend, x: Float32) -> npt.NDArray[np.uint16]:
    """The C kernel's fp16 bits of a flat array."""
    check_array("x", x, FLOAT32, (None,))
    out = np.empty(x.shape, np.uint16)
    lib.cp_to_half(backend.engine, _floats(x), ffi.from_buffer("uint16_t[]", out), x.size)
    return out


def from_half(backend: NativeBackend, bits: npt.NDArray[np.uint16]) -> Float32:
    """The C kernel's binary32 of flat fp16 bits."""
    check_array("bits", bits, UINT16, (None,))
    out = np.empty(bits.shape, np.float32)
    lib.cp_from_half(backend.engine, ffi.from_buffer("uint16_t[]", bits), _floats(out), bits.size)
    return out


def peak_multiply_adds(backend: NativeBackend, rounds: int) -> int:
    """Do multiply-adds of int8 in registers on all threads at once; returns how many were done."""
    return int(lib.cp_peak(backend.engine, rounds))


def read_memory(backend: NativeBackend, data: npt.NDArray[np.uint8]) -> None:
    """Read every byte once, each thread its share, and do nothing with them."""
    lib.cp_read(backend.engine, ffi.from_buffer("uint8_t[]", data), data.nbytes // 4096 * 4096)


def _floats(array: Float32) -> Any:
    return ffi.from_buffer("float[]", array)


def _fill_matrix(c_matrix: Any, matrix: PackedMatrix) -> None:
    c_matrix.data = ffi.from_buffer("uint8_t[]", matrix.data)
    c_matrix.num_bytes = matrix.data.nbytes
    c_matrix.kind = _KINDS[matrix.kind]
    c_matrix.rows = matrix.rows
    c_matrix.cols = matrix.cols
    c_matrix.chunk_rows = matrix.chunk_rows


def _matrix_or_none(matrix: PackedMatrix | None) -> Any:
    if matrix is None:
        return None
    c_matrix = ffi.new("cp_matrix *")
    _fill_matrix(c_matrix, matrix)
    return c_matrix


def _raise_for(code: int, fault: Any) -> None:
    if code == lib.CP_OK:
        return
    where = f"layer {fault.layer} of the group, " if fault.layer >= 0 else ""
    raise KernelError(f"{where}batch row {fault.row}: {_MEANINGS.get(code, f'code {code}')}")
