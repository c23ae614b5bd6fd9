"""Makes a smaller GGUF file of one: chooses types, finds the numbers, writes.

What it costs is measured beside it: the error of the weights by unit here, that of the answers by
`services.quality.evaluate`. Equal inputs give equal files.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from services.quality.budget import Unit, choose
from services.quality.moments import Moments, walk_layers
from services.quality.sensitivity import measure_units
from services.quality.tensors import (
    Matrix,
    Method,
    Quantizer,
    matrices_of,
    quantize_stored,
    types_of,
)
from services.quality.windows import Windows, cut_windows
from shared.errors import ConfigError
from shared.formats.description import ModelDescription
from shared.formats.gguf import read_gguf
from shared.formats.gguf_copy import (
    NewTensor,
    cannot_write,
    staging_path,
    type_bytes,
    write_gguf_copy,
)
from shared.formats.gguf_file import GgufFile, open_gguf
from shared.formats.gguf_from_folder import write_gguf_from
from shared.formats.model import read_model
from shared.quant.blocks import Int4Blocks, Int8Blocks
from shared.text.tokenizer import Tokenizer

CALIBRATION_WINDOW = 512
PROBE_WINDOWS = 2  # that the losses of units are measured on
METADATA_KEY = "cellpipe.quantization"

StageProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What is wanted. `calibration` is a text; `calibration_name` tells of it."""

    bits: int
    method: Method
    calibration: str | None = None
    calibration_name: str = ""
    calibration_windows: int = 16
    max_bits_per_weight: float | None = None
    num_threads: int = 1

    def __post_init__(self) -> None:
        types_of(self.bits, self.method)
        calibrates = self.calibration is not None
        if calibrates and self.method is not Method.SEARCH and not self.max_bits_per_weight:
            raise ConfigError(
                f"--calibrate changes nothing with --method {self.method}",
                remedy="take --method search, or --max-bits-per-weight, or leave it out",
            )
        if self.max_bits_per_weight is None:
            return
        if not (math.isfinite(self.max_bits_per_weight) and self.max_bits_per_weight > 0):
            raise ConfigError(
                f"--max-bits-per-weight must be positive and finite, got {self.max_bits_per_weight}"
            )
        if not calibrates:
            raise ConfigError(
                "--max-bits-per-weight chooses types by the loss that is measured on a text",
                remedy="give one with --calibrate",
            )


@dataclass(frozen=True, slots=True)
class UnitResult:
    """A unit as it was written. `relative_error` is the RMS error of its weights over their RMS;
    `expected_loss` the KL that was foreseen, None without a budget."""

    name: str
    type_name: str
    num_weights: int
    num_bytes: int
    relative_error: float
    expected_loss: float | None


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What was written. `num_bytes` are those of tensors, `num_weights` all weights."""

    units: tuple[UnitResult, ...]
    num_weights: int
    num_bytes: int
    source_bytes: int
    already_quantized: tuple[str, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.num_bytes / self.num_weights


def quantize_file(
    source: Path, target: Path, options: QuantizeOptions, *, progress: StageProgress
) -> QuantizeReport:
    """Write `target`, a GGUF file of the model in `source` with its matrices in fewer bits.

    A Hugging Face folder is written as a GGUF file beside `target` first, which goes at the end.
    Raises `ModelError` for a source that cannot be read, `ConfigError` for a budget that nothing
    fits or a target that another process is writing, `RequestError` for a calibration text that
    fills no window.
    """
    with _only_writer(target):
        if not source.is_dir():
            return _quantize_gguf(source, target, options, progress)
        whole = target.with_name(f".source-{target.name}")
        try:
            write_gguf_from(read_model(source), whole)
            return _quantize_gguf(whole, target, options, progress)
        finally:
            whole.unlink(missing_ok=True)


@contextlib.contextmanager
def _only_writer(target: Path) -> Iterator[None]:
    """Hold the lock of the file that is to become `target`: nobody else writes it, and a folder
    that cannot be written is known of before anything is computed."""
    staging = staging_path(target)
    try:
        file = staging.open("ab")
    except OSError as error:
        raise cannot_write(target, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"{target} is being written by another process",
                remedy="wait for it, or give another name",
            ) from error
        try:
            yield
        finally:
            staging.unlink(missing_ok=True)


def _quantize_gguf(
    source: Path, target: Path, options: QuantizeOptions, progress: StageProgress
) -> QuantizeReport:
    file, description = open_gguf(source), read_gguf(source)
    matrices = matrices_of(description, file)
    quantizer = Quantizer(options.method, options.num_threads)
    windows = _windows(description, options)
    kinds, losses = _choose_types(
        description, file, matrices, windows, quantizer, options, progress
    )
    supply = _MomentsSupply(description, windows if options.method is Method.SEARCH else None)
    sums: dict[str, tuple[float, float]] = {}

    def tensor(matrix: Matrix) -> NewTensor:
        def blocks() -> Int4Blocks | Int8Blocks:
            made, error, power = quantize_stored(
                matrix, kinds[matrix.unit], quantizer, supply.of(matrix)
            )
            before = sums.get(matrix.unit, (0.0, 0.0))
            sums[matrix.unit] = (before[0] + error, before[1] + power)
            return made

        return NewTensor(kinds[matrix.unit], blocks)

    write_gguf_copy(
        file,
        target,
        {matrix.name: tensor(matrix) for matrix in matrices},
        metadata={METADATA_KEY: _told(options)},
        progress=lambda done, total: progress("quantise", done, total),
    )
    return _report(file, matrices, kinds, losses, sums)


class _MomentsSupply:
    """The moments of the inputs of one matrix after the other, in the order of `matrices_of`."""

    def __init__(self, description: ModelDescription, windows: Windows | None) -> None:
        self._walk: Iterator[tuple[list[str], Moments]] | None = None
        if windows is not None:
            self._walk = walk_layers(description, windows)
        self._keys: list[str] = []
        self._moments = Moments()

    def of(self, matrix: Matrix) -> npt.NDArray[np.float64] | None:
        if self._walk is None or not matrix.key:
            return None
        while matrix.key not in self._keys:
            self._keys, self._moments = next(self._walk)
        return self._moments.of(matrix.key)


def _windows(description: ModelDescription, options: QuantizeOptions) -> Windows | None:
    if options.calibration is None:
        return None
    return cut_windows(
        options.calibration,
        Tokenizer.from_vocabulary(description.vocabulary),
        window=min(CALIBRATION_WINDOW, description.config.max_position_embeddings),
        max_windows=options.calibration_windows,
    )


def _choose_types(
    description: ModelDescription,
    file: GgufFile,
    matrices: list[Matrix],
    windows: Windows | None,
    quantizer: Quantizer,
    options: QuantizeOptions,
    progress: StageProgress,
) -> tuple[dict[str, str], dict[str, float]]:
    """The type of each unit, and the loss that is expected of it if it was measured."""
    types = types_of(options.bits, options.method)
    if options.max_bits_per_weight is None:
        return {matrix.unit: types[0] for matrix in matrices}, {}
    assert windows is not None, "the options hold a text whenever they hold a budget"
    units: list[Unit] = measure_units(
        description,
        matrices,
        windows.first(PROBE_WINDOWS),
        types,
        quantizer,
        progress=lambda done, total: progress("measure", done, total),
    )
    num_weights, kept_bytes = _totals(file, matrices)
    max_bytes = int(options.max_bits_per_weight * num_weights / 8) - kept_bytes
    chosen = choose(units, max_bytes=max_bytes)
    return (
        {unit.name: option.type_name for unit, option in zip(units, chosen, strict=True)},
        {unit.name: option.loss for unit, option in zip(units, chosen, strict=True)},
    )


def _totals(file: GgufFile, matrices: list[Matrix]) -> tuple[int, int]:
    """Weights of a file, and the bytes of those tensors that stay as they are."""
    names = {matrix.name for matrix in matrices}
    num_weights = sum(t.num_rows * t.num_cols for t in file.tensors.values())
    kept = sum(t.num_bytes for name, t in file.tensors.items() if name not in names)
    return num_weights, kept


def _report(
    file: GgufFile,
    matrices: list[Matrix],
    kinds: dict[str, str],
    losses: dict[str, float],
    sums: dict[str, tuple[float, float]],
) -> QuantizeReport:
    units = []
    for name, type_name in kinds.items():
        num_weights = sum(matrix.num_weights for matrix in matrices if matrix.unit == name)
        error, power = sums[name]
        units.append(
            UnitResult(
                name=name,
                type_name=type_name,
                num_weights=num_weights,
                num_bytes=type_bytes(type_name, num_weights),
                relative_error=(error / power) ** 0.5 if power else 0.0,
                expected_loss=losses.get(name),
            )
        )
    total, kept = _totals(file, matrices)
    coarse = {matrix.stored.type_name for matrix in matrices} - {"F32", "F16", "BF16", "Q8_0"}
    return QuantizeReport(
        units=tuple(units),
        num_weights=total,
        num_bytes=kept + sum(unit.num_bytes for unit in units),
        source_bytes=sum(tensor.num_bytes for tensor in file.tensors.values()),
        already_quantized=tuple(sorted(coarse)),
    )


def _told(options: QuantizeOptions) -> str:
    told = f"int{options.bits}, {options.method}"
    if options.calibration is not None:
        told += f", calibrated on {options.calibration_name}"
    if options.max_bits_per_weight is not None:
        told += f", at most {options.max_bits_per_weight:g} bits per weight"
    return told
