"""Measures the kernel's matrix products beside the memory's and the instruction set's limits.

Batch 1 reads a matrix that fits no cache: bytes of weights per second beside plain reading of the
same bytes. Larger batches work on a matrix that stays in the cache: int8 multiply-adds per second
beside a loop in registers. Activations of two terms count twice, as they are multiplied twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from services.bench.figures import interleave, median_ratio, spread, timed_rate
from shared.kernel.chunks import aligned_zeros, choose_chunk_rows, matrix_bytes
from shared.kernel.matrix import PackedMatrix

if TYPE_CHECKING:
    from shared.kernel.native import NativeBackend

BATCHES = (4, 16, 64)
SHARE_BATCH = 16  # whose share of the peak is `compute_share`
STREAM_COLS = 2048
CACHED_SHAPE = (1536, 1024)  # 1 MB of int4
MAX_SPREAD = 0.25  # of undisturbed turns it is a few percent
MIN_STREAM_BYTES, MAX_STREAM_BYTES = 128 << 20, 1 << 30


@dataclass
class KernelFigures:
    """One path on `threads` threads. Rates are medians, shares medians of each turn's ratio."""

    path: str
    threads: int
    peak_multiply_adds_per_s: float = 0.0
    read_bytes_per_s: dict[str, float] = field(default_factory=dict)  # in turns with the next
    weight_bytes_per_s: dict[str, float] = field(default_factory=dict)  # by kind, batch 1
    bandwidth_shares: dict[str, float] = field(default_factory=dict)
    multiply_adds_per_s: dict[str, float] = field(default_factory=dict)  # by batch, both terms
    compute_shares: dict[str, float] = field(default_factory=dict)
    spreads: dict[str, float] = field(default_factory=dict)  # of the turns of each measurement

    @property
    def bandwidth_share(self) -> float:
        """Of int4 weights at batch 1."""
        return self.bandwidth_shares["int4"]

    @property
    def compute_share(self) -> float:
        """At batch 16."""
        return self.compute_shares[str(SHARE_BATCH)]

    def doubts(self) -> list[str]:
        """Why these figures are not to be believed: something else ran meanwhile."""
        shares = {f"{kind} batch 1": share for kind, share in self.bandwidth_shares.items()}
        shares |= {f"batch {batch}": share for batch, share in self.compute_shares.items()}
        over = [f"{name} is at {s:.0%} of its limit" for name, s in shares.items() if s > 1.0]
        apart = [
            f"turns of {name} differ by {s:.0%}"
            for name, s in self.spreads.items()
            if s > MAX_SPREAD
        ]
        return over + apart


def stream_bytes() -> int:
    """Twice the last cache, within 128 MiB and 1 GiB."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text.rstrip("KM")) << (20 if text.endswith("M") else 10))
    return min(max(2 * max(sizes), MIN_STREAM_BYTES), MAX_STREAM_BYTES)


def measure_kernels(
    paths: Sequence[str],
    threads: Sequence[int],
    *,
    repeats: int = 7,
    streamed_bytes: int | None = None,
    tell: Callable[[KernelFigures], None],
) -> list[KernelFigures]:
    """Measure each path on each number of threads; `tell` hears of each when it is done."""
    from shared.kernel.native import NativeBackend

    wanted = streamed_bytes or stream_bytes()
    figures = [KernelFigures(path, n) for n in threads for path in paths]
    backends = [NativeBackend(f.path, f.threads) for f in figures]
    for kind in ("int4", "int8"):  # one after the other: each is large
        per_row = matrix_bytes(kind, 16, STREAM_COLS, 16) // 16
        matrix = _matrix(kind, wanted // per_row // 16 * 16, STREAM_COLS)
        for figure, backend in zip(figures, backends, strict=True):
            _measure_stream(figure, backend, matrix, repeats)
    for figure, backend in zip(figures, backends, strict=True):
        _measure_compute(figure, backend, repeats)
        tell(figure)
    return figures


def _matrix(kind: str, rows: int, cols: int) -> PackedMatrix:
    """Bytes below 50: as scales they are small numbers, as weights anything."""
    chunk_rows = choose_chunk_rows(kind, rows, cols)
    data = aligned_zeros(matrix_bytes(kind, rows, cols, chunk_rows))
    pattern = np.random.default_rng(0).integers(0, 50, 1 << 16, dtype=np.uint8)
    for start in range(0, len(data), len(pattern)):
        piece = data[start : start + len(pattern)]
        piece[:] = pattern[: len(piece)]
    return PackedMatrix(kind, rows, cols, chunk_rows, data)


def _measure_stream(
    figure: KernelFigures, backend: NativeBackend, matrix: PackedMatrix, repeats: int
) -> None:
    from shared.kernel.native import BoundMatmul, read_memory

    x = np.random.default_rng(1).standard_normal((1, matrix.cols)).astype(np.float32)
    terms = 1 if matrix.kind == "int4" else 2  # as most of a layer, and as the head
    size = matrix.data.nbytes
    rates = interleave(
        {
            "read": timed_rate(lambda: read_memory(backend, matrix.data), size),
            "multiply": timed_rate(BoundMatmul(backend, matrix, x, terms), size),
        },
        repeats,
    )
    figure.spreads |= {f"{matrix.kind} {name}": spread(turns) for name, turns in rates.items()}
    figure.read_bytes_per_s[matrix.kind] = statistics.median(rates["read"])
    figure.weight_bytes_per_s[matrix.kind] = statistics.median(rates["multiply"])
    figure.bandwidth_shares[matrix.kind] = median_ratio(rates, "multiply", "read")


def _measure_compute(figure: KernelFigures, backend: NativeBackend, repeats: int) -> None:
    """One and two terms in turn, about as a layer mixes them."""
    from shared.kernel.native import BoundMatmul, peak_multiply_adds

    matrix = _matrix("int4", *CACHED_SHAPE)
    rounds = 2_000_000 if figure.path != "portable" else 100_000
    counted = peak_multiply_adds(backend, 1) * rounds
    measures = {"peak": timed_rate(lambda: peak_multiply_adds(backend, rounds), counted)}
    for batch in BATCHES:
        x = np.random.default_rng(batch).standard_normal((batch, matrix.cols)).astype(np.float32)
        products = [BoundMatmul(backend, matrix, x, terms) for terms in (1, 2)]
        turns = max(1, 256 // batch) if figure.path != "portable" else 1
        amount = 3 * matrix.rows * matrix.cols * batch * turns
        measures[str(batch)] = timed_rate(_repeated(products, turns), amount)
    rates = interleave(measures, repeats)
    names = {name: "the peak" if name == "peak" else f"batch {name}" for name in rates}
    figure.spreads |= {names[name]: spread(turns) for name, turns in rates.items()}
    figure.peak_multiply_adds_per_s = statistics.median(rates["peak"])
    for batch in BATCHES:
        name = str(batch)
        figure.multiply_adds_per_s[name] = statistics.median(rates[name])
        figure.compute_shares[name] = median_ratio(rates, name, "peak")


def _repeated(products: Sequence[Callable[[], object]], turns: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(turns):
            for product in products:
                product()

    return run
