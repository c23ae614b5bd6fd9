"""`cellpipe calibrate`: measures this machine, so that `cellpipe plan` can speak of it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.plan import CALIBRATION_FILE, open_library
from services.cli.progress import Teller
from services.cli.settings import DEFAULT_MODEL, load_config, numbers
from services.cli.terminating import end_clean_at_sigterm
from services.cli.tree import app
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.bench.hops import Hop
    from services.bench.options import ClusterFigures
    from services.planner.calibration import Point


@app.command()
def calibrate(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Where to write the specs. Default: the cache folder."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count; medians are taken.")] = 3,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Then measure 1, 2 and 3 groups beside the prediction."),
    ] = False,
    groups: Annotated[str, typer.Option(help="Layer groups of --compare.")] = "1,2,3",
    streams: Annotated[str, typer.Option(help="Streams of --compare.")] = "1,4,16",
    table: Annotated[
        Path | None,
        typer.Option(help="Put the table of --compare between the marks in this document."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure kernel, memory, broker, Redis and a small cluster, and write a file of specs named
    `this`. It takes a minute or two; let nothing else run meanwhile.

    Example: cellpipe calibrate && cellpipe plan --model smollm2-135m --pool this:6

    Example: cellpipe calibrate --compare --table docs/planning.md
    """
    from services.bench.calibrate import (
        measure_loads,
        measure_machine,
        measure_servers,
        peak_and_read,
        usable_memory_bytes,
    )
    from services.bench.options import ClusterOptions
    from services.planner.calibration import (
        MANY,
        Measured,
        between_marks,
        calibration_toml,
        comparison,
        predict,
    )

    end_clean_at_sigterm()
    if table is not None:
        if not compare:
            raise ConfigError("--table goes with --compare")
        between_marks(_read(table), [], str(table))  # says now that there is no place
    config = load_config(quiet=True)
    say = Teller().say
    path = output or config.cache_dir / CALIBRATION_FILE
    options = ClusterOptions(
        model=DEFAULT_MODEL, num_groups=(1, 2), concurrency=(1, MANY), num_tokens=tokens,
        rounds=rounds,
    )  # fmt: skip
    peak, read = peak_and_read(measure_machine(say))
    rates = measure_servers(options, say)
    figures = measure_loads(options, say)
    measured = Measured(
        cores=_cores(),
        memory_bytes=usable_memory_bytes(),
        read_bytes_per_s=read,
        peak_multiply_adds_per_s=peak,
        broker_messages_per_s=rates.broker_messages_per_s,
        broker_bytes_per_s=rates.broker_bytes_per_s,
        redis_operations_per_s=rates.redis_operations_per_s,
        redis_bytes_per_s=rates.redis_bytes_per_s,
        redis_round_trip_s=figures.layouts[0].redis_round_trip.p50_ms / 1e3,
        num_prompt=options.num_prompt,
        num_tokens=options.num_tokens,
        points=tuple(_points(figures)),
    )
    library = open_library([], calibrated=False)
    model = library.model(DEFAULT_MODEL)
    _write(path, calibration_toml(measured, model))
    shown: dict[str, object] = {"file": str(path), "measured": asdict(measured)}
    lines: list[str] = []
    if compare:
        library.add_file(path)
        options = ClusterOptions(
            model=DEFAULT_MODEL, num_groups=numbers(groups, field="--groups"),
            concurrency=numbers(streams, field="--streams", most=256), num_tokens=tokens,
            rounds=rounds,
        )  # fmt: skip
        found = _points(measure_loads(options, say))
        said = [
            predict(
                model, library.parse_pool(f"this:{point.groups}"), point.groups, point.streams,
                num_prompt=options.num_prompt, num_tokens=tokens,
            )
            for point in found
        ]  # fmt: skip
        lines = comparison(found, said)
        shown["compared"] = [
            {"measured": asdict(a), "predicted": asdict(b)}
            for a, b in zip(found, said, strict=True)
        ]
        if table is not None:
            _write(table, between_marks(_read(table), lines, str(table)))
    if as_json:
        typer.echo(json.dumps(shown))
        return
    typer.echo(f"{path} describes this machine: cellpipe plan -m {DEFAULT_MODEL} --pool this:6")
    for line in lines:
        typer.echo(line)


def _points(figures: ClusterFigures) -> list[Point]:
    from services.planner.calibration import Point

    found = []
    for layout in figures.layouts:
        for point in layout.points:
            hops = point.hops
            found.append(
                Point(
                    layout.num_groups,
                    point.concurrency,
                    point.load.tokens_per_s,
                    point.load.first_p50_ms / 1e3,
                    point.gap_ms / 1e3,
                    _mean_s(hops, "compute"),
                    _mean_s(hops, "broker"),
                    _mean_s(hops, "decode", "prepare", "publish"),
                    hops[-1].stage_ms["redis"] / 1e3,
                    sum(hop.batch for hop in hops) / len(hops),
                )
            )
    return found


def _mean_s(hops: list[Hop], *stages: str) -> float:
    """Of a step at one hop, over the groups."""
    return sum(sum(hop.stage_ms[name] for name in stages) for hop in hops) / len(hops) / 1e3


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
