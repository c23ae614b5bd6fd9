"""`cellpipe quantize`: a smaller file of a model."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.evaluate import AsJson, read_text
from services.cli.generate import Threads
from services.cli.progress import StageBar, StepBar
from services.cli.settings import load_config
from services.cli.tree import app
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.quality.quantize import QuantizeReport


@app.command()
def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="A .gguf file with more bits (F32, F16, BF16, Q8_0), its name in the catalog, or "
            "a Hugging Face folder of Llama or Qwen; of others give a GGUF file."
        ),
    ],
    output: Annotated[Path, typer.Argument(help="The .gguf file to write.")],
    bits: Annotated[int, typer.Option(help="4 or 8.")] = 4,
    method: Annotated[
        str,
        typer.Option(
            help="How 4 bits are found: symmetric (scale = max|w|/7), range (from the least to the "
            "largest weight of a group), search (the least error)."
        ),
    ] = "",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="A text, UTF-8: the search then minimises what a layer's answers are off on it, "
            "and not what weights are off."
        ),
    ] = None,
    calibration_windows: Annotated[
        int, typer.Option(help="Windows of 512 tokens of that text that are used.", min=1)
    ] = 16,
    max_bits_per_weight: Annotated[
        float | None,
        typer.Option(
            help="Give each kind of tensor 4 or 8 bits so that the file stays below this, and the "
            "loss that is measured on the text is least. Needs --calibrate."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUTPUT.")] = False,
    threads: Threads = 0,
    as_json: AsJson = False,
) -> None:
    """Make a smaller model file, which llama.cpp runs too. docs/quality.md says what it costs.

    Types are those that the kernel holds as they are: Q4_0, Q4_1 and Q8_0.

    Example: cellpipe quantize f16.gguf int4.gguf --bits 4 --calibrate book.txt

    Example: cellpipe quantize f16.gguf mixed.gguf --calibrate book.txt --max-bits-per-weight 4.75
    """
    from services.loader.pull import resolve_model
    from services.quality.quantize import QuantizeOptions, quantize_file
    from services.quality.tensors import Method

    config = load_config(quiet=True)
    usual = Method.SYMMETRIC if bits == 8 and not calibrate else Method.SEARCH
    if method and method not in set(Method):
        raise ConfigError(f"--method must be one of {', '.join(Method)}, got {method!r:.40}")
    options = QuantizeOptions(
        bits=bits,
        method=Method(method) if method else usual,
        calibration=read_text(calibrate, field="--calibrate") if calibrate else None,
        calibration_name=calibrate.name if calibrate else "",
        calibration_windows=calibration_windows,
        max_bits_per_weight=max_bits_per_weight,
        num_threads=threads or len(os.sched_getaffinity(0)),
    )
    with StageBar() as bar:
        source = resolve_model(model, config.cache_dir, progress=bar.show)
    _check_output(output, source, overwrite)
    with StepBar("") as steps:
        report = quantize_file(source, output, options, progress=steps.show_stage)
    _print_quantized(report, output, as_json)


def _check_output(output: Path, source: Path, overwrite: bool) -> None:
    if output.suffix.lower() != ".gguf":
        raise ConfigError(f"the output must be called ….gguf, got {output.name}")
    if not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent}")
    if not output.exists():
        return
    if output.samefile(source):
        raise ConfigError(f"{output} is the model itself", remedy="give another place")
    if not overwrite:
        raise ConfigError(f"{output} is there already", remedy="give another name, or --overwrite")


def _print_quantized(report: QuantizeReport, output: Path, as_json: bool) -> None:
    if report.already_quantized:
        typer.echo(
            f"note: the source has tensors of {', '.join(report.already_quantized)}: what it lost "
            "before is not undone, and adds to what is lost now",
            err=True,
        )
    if as_json:
        shown = asdict(report) | {"bits_per_weight": report.bits_per_weight, "path": str(output)}
        typer.echo(json.dumps(shown))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "tensors", "type", "weights", "MB", "relative RMS error of weights", "expected loss",
        title=f"{output.name}: {report.bits_per_weight:.3f} bits per weight",
    )  # fmt: skip
    for unit in report.units:
        table.add_row(
            unit.name,
            unit.type_name,
            f"{unit.num_weights:,}",
            f"{unit.num_bytes / 1e6:.2f}",
            f"{unit.relative_error:.5f}",
            "" if unit.expected_loss is None else f"{unit.expected_loss:.6f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{report.num_bytes / 1e6:.1f} MB of tensors, {report.num_bytes / report.source_bytes:.1%} "
        "of the source's"
    )
