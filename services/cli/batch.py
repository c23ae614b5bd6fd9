"""`cellpipe batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.generate import Cluster, Groups, Model, Threads
from services.cli.progress import BatchBar
from services.cli.settings import load_config
from services.cli.terminating import noted_sigint
from services.cli.tree import EXIT_FAILED, app
from shared.errors import ConfigError
from shared.messages import MAX_TOKENS_LIMIT

if TYPE_CHECKING:
    from services.batch.lines import BatchInput, Reading
    from services.batch.output import BatchOutput
    from services.cli.session import Session


@app.command()
def batch(
    requests: Annotated[
        Path,
        typer.Argument(
            help="JSON lines with custom_id, method, url and body.", exists=True, dir_okay=False
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Where the answers go; it is gone on with."),
    ],
    model: Model = "",
    cluster: Cluster = None,
    concurrency: Annotated[
        int, typer.Option(help="Requests under way at once.", min=1, max=10_000)
    ] = 32,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            "-n",
            min=1,
            max=MAX_TOKENS_LIMIT,
            help="Longest answer to a chat that names no limit, in tokens; else all that the "
            "model holds, as by HTTP.",
        ),
    ] = None,
    attempt: Annotated[
        int,
        typer.Option(
            help="2 asks once more for the lines that tell of an error, 3 for those that still do.",
            min=1,
            max=999,
        ),
    ] = 1,
    groups: Groups = 1,
    threads: Threads = 0,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    A body means the same as by HTTP; a line that asks for what is not served has a 400 that names
    the field.

    They are served when nobody else waits. Ctrl-C, a crash and kill -9 lose nothing: the same
    command goes on where it was, and every custom_id gets one line. Exit code 1 when a line tells
    of an error: --attempt 2 asks for those once more, and the same command for those that you
    have repaired in the input.

    Example: cellpipe batch requests.jsonl -o answers.jsonl
    """
    from services.batch.lines import BatchInput, Reading
    from services.batch.output import BatchOutput
    from services.cli.session import open_session

    config = load_config(quiet=True)
    if output.exists() and output.samefile(requests):
        raise ConfigError("the output must be another file than the input")
    with open_session(
        config, model=model, cluster=cluster, num_groups=groups, num_threads=threads
    ) as session:
        # What an answer depends on beside its line: other answers are not to be taken for it.
        salt = f"{session.model_id} {max_tokens}"
        lines = BatchInput(requests, salt=salt, attempt=attempt)
        with closing(BatchOutput(output, lines.entries, attempt=attempt)) as answers:
            if answers.num_repaired:
                typer.echo(
                    f"{answers.num_repaired} lines that failed were changed since: asked anew",
                    err=True,
                )
            num_failed = _run(
                session,
                lines,
                answers,
                concurrency=concurrency,
                reading=Reading(
                    session.model,
                    chat_tokens=max_tokens,
                ),
            )
            failures = answers.failures
    if num_failed:
        for failure in failures:
            typer.echo(f"  {failure}", err=True)
        if num_failed > len(failures):
            typer.echo(f"  and {num_failed - len(failures)} more in {output}", err=True)
        typer.echo(
            f"the same command with --attempt {attempt + 1} asks for these once more; a line that "
            "is repaired is asked anew by the same command",
            err=True,
        )
        raise typer.Exit(EXIT_FAILED)


def _run(
    session: Session,
    lines: BatchInput,
    answers: BatchOutput,
    *,
    concurrency: int,
    reading: Reading,
) -> int:
    """How many lines tell of an error."""
    from services.batch.run import BatchLimits, BatchRun

    run = BatchRun(
        producer=session.producer,
        output=answers,
        entries=lines.entries,
        read=lambda entry: lines.read(entry, reading),
        check=session.check,
        model=session.model,
        limits=BatchLimits(concurrency=concurrency),
    )
    num_before = len(answers.done)
    with BatchBar() as bar, noted_sigint() as is_interrupted:
        try:
            while not run.is_done:
                bar.show(run.progress())
                run.turn()
                if is_interrupted():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            bar.end(run.progress(), num_before=num_before)
            typer.echo("interrupted; the same command goes on from here", err=True)
            raise
        bar.end(run.progress(), num_before=num_before)
    return run.progress().num_failed
