"""`cellpipe evaluate`: what a model knows of a text, and how far it is from a reference."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.evaluate_cluster import check_cluster_options, evaluate_in_cluster
from services.cli.generate import Threads
from services.cli.progress import StageBar, StepBar
from services.cli.session import kernel_backend
from services.cli.settings import load_config
from services.cli.tree import app
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.quality.evaluate import Evaluation
    from services.quality.footprint import Footprint
    from services.quality.report import Subject
    from services.quality.stages import StagedModel
    from services.quality.windows import Windows
    from shared.config import Config
    from shared.text.tokenizer import Tokenizer

MAX_TEXT_BYTES = 1 << 30


class Arithmetic(StrEnum):
    KERNEL = "kernel"
    FLOAT = "float"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
WORDS = {
    Arithmetic.KERNEL: "the kernel that answers requests",
    Arithmetic.FLOAT: "binary32",
}


@app.command()
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            help="A catalog name (smollm2-135m), a .gguf file or a Hugging Face folder."
        ),
    ],
    text: Annotated[Path, typer.Option("--text", help="The text to score, a UTF-8 file.")],
    reference: Annotated[
        str,
        typer.Option(
            help="The same model with more bits, to say how far MODEL is from it: by distribution, "
            "by likeliest token and layer by layer. It is computed in binary32."
        ),
    ] = "",
    window: Annotated[
        int, typer.Option(help="Tokens of a window; the second half of each is scored.")
    ] = 512,
    windows: Annotated[
        int, typer.Option(help="Score the first so many windows; 0 is all.", min=0)
    ] = 0,
    arithmetic: Annotated[
        Arithmetic,
        typer.Option(
            help="kernel computes what requests get, its quantised activations included; float "
            "computes in binary32: what the weights alone cost."
        ),
    ] = Arithmetic.KERNEL,
    threads: Threads = 0,
    html: Annotated[
        Path | None, typer.Option(help="Write the report as a page that needs nothing beside it.")
    ] = None,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Ask the workers of a cluster, one request for each scored token, when nobody "
            'else waits. MODEL is one that is loaded there, "" the last.',
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Perplexity of a model on a text, by llama.cpp's method, so that figures compare.

    With --reference also KL divergence, how often both find the same token likeliest, and the
    error after each layer. With --cluster the workers of a cluster compute the perplexity;
    --reference and --arithmetic float run in this process alone.

    Example: cellpipe evaluate smollm2-135m --text /usr/share/common-licenses/GPL-3

    Example: cellpipe evaluate int4.gguf --reference f16.gguf --text book.txt --html report.html

    Example: cellpipe evaluate smollm2-135m --text book.txt --windows 2 --cluster
    """
    from services.quality.evaluate import evaluate as run_evaluation
    from services.quality.report import Subject, check_html, write_html
    from services.quality.windows import cut_windows

    config = load_config(quiet=True)
    if cluster:
        check_cluster_options(reference=reference, arithmetic=arithmetic, threads=threads)
    if html is not None and (note := check_html(html)):
        typer.echo(f"note: {note}", err=True)
    content = read_text(text, field="--text")

    def cut_for(tokenizer: Tokenizer) -> Windows:
        return cut_windows(
            content,
            tokenizer,
            window=window,
            max_windows=windows,
            remedy=", or a shorter --window (figures of different windows do not compare)",
        )

    footprint: Footprint | None
    if cluster:
        name, words, found, footprint = evaluate_in_cluster(config, model, cut_for)
        subject = Subject(model=name, arithmetic=words, text=text.name)
    else:
        staged, tokenizer, footprint, name = _open(config, model, arithmetic, threads)
        cut = cut_for(tokenizer)
        other = reference_name = None
        if reference:
            other, _, _, reference_name = _open(config, reference, Arithmetic.FLOAT, threads)
        with StepBar("windows x layers") as bar:
            found = run_evaluation(staged, cut, reference=other, progress=bar.show)
        subject = Subject(
            model=name,
            arithmetic=WORDS[arithmetic],
            text=text.name,
            reference=reference_name or "",
            reference_arithmetic=WORDS[Arithmetic.FLOAT] if reference else "",
        )
    _print(subject, found, footprint, as_json)
    if html is not None:  # last: what was computed is not lost if it cannot be written
        write_html(html, subject, found, footprint)


def read_text(path: Path, *, field: str) -> str:
    """A UTF-8 file. Raises `ConfigError` naming the option and the file."""
    try:
        with path.open("rb") as file:  # which may be a pipe: its length is not known before
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise ConfigError(f"{field} {path} is larger than {MAX_TEXT_BYTES >> 20} MiB")
        return content.decode("utf-8")
    except OSError as error:
        raise ConfigError(f"{field} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{field} {path} is not UTF-8: byte {error.start}") from error


def _open(
    config: Config, model: str, arithmetic: Arithmetic, threads: int
) -> tuple[StagedModel, Tokenizer, Footprint | None, str]:
    """A model as stages, its tokenizer, what it takes as the kernel keeps it, and its name.

    One that is computed in binary32 is not packed.
    """
    from services.loader.packed import open_model
    from services.quality.footprint import footprint_of
    from services.quality.stages import FloatStages, KernelModel
    from shared.text.document import read_text_document
    from shared.text.tokenizer import Tokenizer

    if arithmetic is Arithmetic.FLOAT:
        from services.loader.pull import resolve_model
        from shared.formats.model import read_model

        with StageBar() as bar:
            path = resolve_model(model, config.cache_dir, progress=bar.show)
        description = read_model(path)
        tokenizer = Tokenizer.from_vocabulary(description.vocabulary)
        stages = FloatStages(description.config, description.tensors)
        return stages, tokenizer, None, description.source
    with StageBar() as bar:
        packed = open_model(model, config.cache_dir, progress=bar.show)
    tokenizer, _ = read_text_document(bytes(packed.read_shard("tokenizer")))
    backend = kernel_backend(config, threads or len(os.sched_getaffinity(0)))
    staged = KernelModel(packed.manifest, packed.read_shard, backend)
    return staged, tokenizer, footprint_of(packed.manifest), packed.manifest.model_id


def _print(
    subject: Subject, evaluation: Evaluation, footprint: Footprint | None, as_json: bool
) -> None:
    from services.quality.report import report_dict, sections

    if as_json:
        typer.echo(json.dumps(report_dict(subject, evaluation, footprint)))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"[bold]{subject.model}[/bold] on {subject.text}, by {subject.arithmetic}"
        + (f"; reference {subject.reference}, by {subject.reference_arithmetic}"
           if subject.reference else ""),
        highlight=False,
    )  # fmt: skip
    for section in sections(evaluation, footprint):
        table = Table(title=section.title, show_header=False, title_justify="left")
        table.add_column()
        table.add_column(justify="right", no_wrap=True)
        table.add_column(style="dim")
        for row in section.rows:
            table.add_row(row.name, row.value, row.meaning)
        console.print(table)
