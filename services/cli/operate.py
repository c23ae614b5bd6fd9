"""`cellpipe dead`, `cancel`, `workers` and `drain`: what an operator does to a running cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.settings import load_config
from services.cli.tree import EXIT_UNAVAILABLE, app
from shared.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from shared.dead_queue import DeadQueue, Letter
    from shared.store.presence_types import WorkerInfo

dead = typer.Typer(
    help="Look at, retry or drop what was given up: the dead-letter queue.",
    epilog="Example: cellpipe dead list",
    no_args_is_help=True,
)
app.add_typer(dead, name="dead")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
LetterId = Annotated[str, typer.Argument(help="An id that `cellpipe dead list` shows.")]
HEX_SHOWN = 512


@dead.command("list")
def dead_list(as_json: AsJson = False) -> None:
    """List dead letters, the oldest first; they stay.

    Example: cellpipe dead list
    """
    with _dead_letters() as letters:
        found = letters.letters()
    if as_json:
        typer.echo(json.dumps([letter_dict(letter) for letter in found]))
        return
    if not found:
        typer.echo("no dead letters")
        return
    now_ms = time.time_ns() // 1_000_000
    for letter in found:
        typer.echo(letter_line(letter, now_ms))


@dead.command("show")
def dead_show(letter_id: LetterId, as_json: AsJson = False) -> None:
    """Show one dead letter with its history and the beginning of its body.

    Example: cellpipe dead show 3f2a9c01bd
    """
    with _dead_letters() as letters:
        found = [letter for letter in letters.letters() if letter.letter_id == letter_id]
    if not found:
        raise RequestError(
            f"no dead letter {letter_id!r:.80}", remedy="see what there is: cellpipe dead list"
        )
    shown = {**letter_dict(found[0]), "body_hex": found[0].body[:HEX_SHOWN].hex()}
    if as_json:
        typer.echo(json.dumps(shown))
        return
    for row in letter_rows(shown, time.time_ns() // 1_000_000):
        typer.echo(row)


@dead.command("retry")
def dead_retry(letter_id: LetterId, as_json: AsJson = False) -> None:
    """Ask the letter's request once more, under a new id, which is printed.

    Example: cellpipe dead retry 3f2a9c01bd
    """
    with _dead_letters() as letters:
        request_id = letters.retry(letter_id)
    typer.echo(json.dumps({"request_id": request_id}) if as_json else request_id)


@dead.command("purge")
def dead_purge(
    letter_id: Annotated[str, typer.Argument(help="The letter to drop.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Drop all letters.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop one dead letter, or all.

    Example: cellpipe dead purge --all
    """
    if bool(letter_id) == everything:
        raise ConfigError("give the id of a dead letter, or --all")
    with _dead_letters() as letters:
        num_dropped = letters.purge(letter_id)
    typer.echo(json.dumps({"dropped": num_dropped}) if as_json else f"{num_dropped} dropped")


@app.command()
def cancel(
    request_id: Annotated[str, typer.Argument(help="The id of a request that runs.")],
    queued: Annotated[
        bool, typer.Option("--queued", help="Also one that no scheduler has taken yet.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """End a request; whoever waits for it hears that it was aborted.

    Example: cellpipe cancel r-0123456789abcdef01234567
    """
    from services.cli.session import open_stores
    from shared.ended import aborted_record
    from shared.messages import FinishReason, check_request_id
    from shared.store.ledger import Ledger

    config = load_config(quiet=True)
    check_request_id(request_id)
    with open_stores(config) as stores:
        ledger = Ledger.of(stores)
        # A scheduler may have admitted it between the two: then it is there for a third.
        if (
            ledger.finish(request_id, FinishReason.ABORT)
            or (queued and ledger.refuse(aborted_record(request_id)))
            or (queued and ledger.finish(request_id, FinishReason.ABORT))
        ):
            told = {"request_id": request_id, "cancelled": True}
            typer.echo(json.dumps(told) if as_json else f"{request_id} cancelled")
            return
        state = ledger.states([request_id]).get(request_id)
    if state is None:
        raise RequestError(
            f"request {request_id} is not known",
            remedy=f"if it waits in its queue: cellpipe cancel {request_id} --queued",
        )
    ended = {"request_id": request_id, "cancelled": False, "finish_reason": state.finish_reason}
    typer.echo(
        json.dumps(ended) if as_json else f"{request_id} had ended already ({state.finish_reason})"
    )


@app.command()
def workers(as_json: AsJson = False) -> None:
    """Show the workers that live now, and what each is doing.

    One that died is gone from the list when its presence has run out, 5 s after its last heartbeat.
    Exit code 3 when nobody lives.

    Example: cellpipe workers --json
    """
    from services.cli.session import open_stores
    from shared.store.presence import Presence
    from shared.store.shards import ShardStore

    with open_stores(load_config(quiet=True)) as stores:
        layout = ShardStore(stores.weights).active_layout("")
        found = Presence(stores.meta).workers(layout)
    now_ms = time.time_ns() // 1_000_000
    if as_json:
        typer.echo(json.dumps([_worker_dict(worker, now_ms) for worker in found]))
    elif not found:
        typer.echo("no worker lives; start one: cellpipe worker")
    if not found:
        raise typer.Exit(EXIT_UNAVAILABLE)
    if as_json:
        return
    for worker in found:
        shown = _worker_dict(worker, now_ms)
        idle = "never" if shown["idle_s"] is None else f"{shown['idle_s']:.1f} s ago"
        typer.echo(
            f"{worker.worker_id:32} {shown['state']:9} groups "
            f"{','.join(map(str, worker.groups)) or '-':8} {worker.num_steps:>8} steps, "
            f"the last {idle}, {worker.rss_bytes / 1e6:.0f} MB, pid {worker.pid} on {worker.host}"
        )


@app.command()
def drain(
    worker_id: Annotated[str, typer.Argument(help="An id that `cellpipe workers` shows.")],
    as_json: AsJson = False,
) -> None:
    """Ask a worker to finish what it has and leave; it hears with its next heartbeat.

    Example: cellpipe drain pi-4711-3fa2
    """
    from services.cli.session import open_stores
    from shared.store.presence import Presence
    from shared.store.shards import ShardStore

    with open_stores(load_config(quiet=True)) as stores:
        layout = ShardStore(stores.weights).active_layout("")
        presence = Presence(stores.meta)
        living = [worker.worker_id for worker in presence.workers(layout)]
        if worker_id not in living:
            raise RequestError(
                f"no worker {worker_id!r:.80} lives", remedy="see who does: cellpipe workers"
            )
        presence.request_drain(worker_id, layout)
    told = {"worker_id": worker_id, "state": "draining"}
    typer.echo(json.dumps(told) if as_json else f"{worker_id} is asked to drain")


@contextmanager
def _dead_letters() -> Iterator[DeadQueue]:
    from services.cli.session import open_cluster
    from shared.dead_queue import DeadQueue
    from shared.store.ledger import Ledger

    with open_cluster(load_config(quiet=True)) as (broker, stores):
        yield DeadQueue(broker, Ledger.of(stores))


def letter_dict(letter: Letter) -> dict[str, Any]:
    """As JSON: what is not known is null, not the number or the text that stands for it inside."""
    shown = asdict(letter)
    del shown["body"]
    history = shown["history"]
    unknown = {"group": -1, "attempts": 0, "died_unix_ms": 0}
    shown["history"] = {
        name: None if value in ("", (), unknown.get(name, "")) else value
        for name, value in history.items()
    }
    return shown


def letter_line(letter: Letter, now_ms: int) -> str:
    """A letter in the list of all."""
    died_ms = letter.history.died_unix_ms
    age = _ago(died_ms, now_ms) if died_ms else "-"
    where = "" if letter.group is None else f" group {letter.group} position {letter.position}"
    why = letter.history.reason or letter.error or letter.problem
    return (
        f"{letter.letter_id}  {letter.kind:8} {letter.request_id or '-':28}"
        f"{letter.num_bytes:>8} B  {age:>10}{where}  {why}"
    )


def letter_rows(shown: dict[str, Any], now_ms: int) -> Iterator[str]:
    """A letter, as `letter_dict` made it, for a person: what is not known has no row."""
    for name, value in shown.items():
        if name == "history":
            for key, told in value.items():
                if told is not None:
                    yield f"{'history':12} {_history_row(key, told, now_ms)}"
        elif value not in (None, ""):
            yield f"{name:12} {value}"


def _history_row(name: str, value: Any, now_ms: int) -> str:
    if name == "died_unix_ms":
        at = datetime.fromtimestamp(value / 1000).astimezone().isoformat(" ", "seconds")
        return f"died: {at}, {_ago(value, now_ms)}"
    return f"{name}: {', '.join(value) if isinstance(value, tuple) else value}"


def _ago(unix_ms: int, now_ms: int) -> str:
    seconds = max(0, now_ms - unix_ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _worker_dict(worker: WorkerInfo, now_ms: int) -> dict[str, Any]:
    from services.cli.overview import mean_stages_us

    idle_ms = now_ms - worker.last_step_unix_ms if worker.last_step_unix_ms else None
    shown = asdict(worker)
    del shown["stage_us"]
    return {
        **shown,
        "stages_us": mean_stages_us(worker),
        "idle_s": None if idle_ms is None else max(0, idle_ms) / 1e3,
        "age_s": max(0, now_ms - worker.started_unix_ms) / 1e3,
    }
