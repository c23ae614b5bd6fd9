"""`cellpipe dead`, `cancel`, `workers` and `drain`: what an operator does to a running cluster."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from services.cli.settings import load_config
from services.cli.tree import app
from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.dead_queue import DeadQueue, Letter
    from shared.store.presence_types import WorkerInfo

dead = typer.Typer(
    help="Look at, retry or drop what was given up: the dead-letter queue.", no_args_is_help=True
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
        typer.echo(json.dumps([_letter_dict(letter) for letter in found]))
        return
    if not found:
        typer.echo("no dead letters")
        return
    for letter in found:
        where = "" if letter.group is None else f" group {letter.group} position {letter.position}"
        why = letter.history.reason or letter.error or letter.problem
        typer.echo(
            f"{letter.letter_id}  {letter.kind:8} {letter.request_id or '-':28}"
            f"{letter.num_bytes:>8} B{where}  {why}"
        )


@dead.command("show")
def dead_show(letter_id: LetterId, as_json: AsJson = False) -> None:
    """Show one dead letter with its history and the beginning of its body.

    Example: cellpipe dead show 3f2a9c01bd
    """
    with _dead_letters() as letters:
        found = [letter for letter in letters.letters() if letter.letter_id == letter_id]
    if not found:
        raise ConfigError(f"no dead letter {letter_id!r}", remedy="see: cellpipe dead list")
    shown = {**_letter_dict(found[0]), "body_hex": found[0].body[:HEX_SHOWN].hex()}
    if as_json:
        typer.echo(json.dumps(shown))
        return
    for name, value in shown.items():
        if isinstance(value, dict):
            for key, text in value.items():
                typer.echo(f"{'history':12} {key}: {text}")
        elif value not in (None, ""):
            typer.echo(f"{name:12} {value}")


@dead.command("retry")
def dead_retry(letter_id: LetterId) -> None:
    """Ask the letter's request once more, under a new id, which is printed.

    Example: cellpipe dead retry 3f2a9c01bd
    """
    with _dead_letters() as letters:
        typer.echo(letters.retry(letter_id))


@dead.command("purge")
def dead_purge(
    letter_id: Annotated[str, typer.Argument(help="The letter to drop.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Drop all letters.")] = False,
) -> None:
    """Drop one dead letter, or all.

    Example: cellpipe dead purge --all
    """
    if bool(letter_id) == everything:
        raise ConfigError("give the id of a dead letter, or --all")
    with _dead_letters() as letters:
        typer.echo(f"{letters.purge(letter_id)} dropped")


@app.command()
def cancel(
    request_id: Annotated[str, typer.Argument(help="The id of a request that runs.")],
    queued: Annotated[
        bool, typer.Option("--queued", help="Also one that no scheduler has taken yet.")
    ] = False,
) -> None:
    """End a request; whoever waits for it hears that it was aborted.

    Example: cellpipe cancel r-0123456789abcdef01234567
    """
    from services.cli.session import open_stores
    from shared.ended import aborted_record
    from shared.errors import RequestError
    from shared.messages import FinishReason, check_request_id
    from shared.store.ledger import Ledger

    config = load_config(quiet=True)
    check_request_id(request_id)
    with open_stores(config) as stores:
        ledger = Ledger(stores.meta)
        # A scheduler may have admitted it between the two: then it is there for a third.
        if (
            ledger.finish(request_id, FinishReason.ABORT)
            or (queued and ledger.refuse(aborted_record(request_id)))
            or (queued and ledger.finish(request_id, FinishReason.ABORT))
        ):
            typer.echo(f"{request_id} cancelled")
            return
        state = ledger.states([request_id]).get(request_id)
    if state is None:
        raise RequestError(
            f"request {request_id} is not known",
            remedy=f"if it waits in its queue: cellpipe cancel {request_id} --queued",
        )
    typer.echo(f"{request_id} had ended already ({state.finish_reason})")


@app.command()
def workers(as_json: AsJson = False) -> None:
    """Show the workers that live now, and what each is doing.

    One that died is gone from the list when its presence has run out, 5 s after its last heartbeat.

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
        return
    if not found:
        typer.echo("no worker lives")
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
            raise ConfigError(
                f"no worker {worker_id!r:.80} lives", remedy="see who does: cellpipe workers"
            )
        presence.request_drain(worker_id, layout)
    typer.echo(f"{worker_id} is asked to drain")


@contextmanager
def _dead_letters() -> Iterator[DeadQueue]:
    from services.cli.session import open_cluster
    from shared.dead_queue import DeadQueue
    from shared.store.ledger import Ledger

    with open_cluster(load_config(quiet=True)) as (broker, stores):
        yield DeadQueue(broker, Ledger(stores.meta))


def _letter_dict(letter: Letter) -> dict[str, Any]:
    shown = asdict(letter)
    del shown["body"]
    return shown


def _worker_dict(worker: WorkerInfo, now_ms: int) -> dict[str, Any]:
    idle_ms = now_ms - worker.last_step_unix_ms if worker.last_step_unix_ms else None
    return {
        **asdict(worker),
        "idle_s": None if idle_ms is None else max(0, idle_ms) / 1e3,
        "age_s": max(0, now_ms - worker.started_unix_ms) / 1e3,
    }
