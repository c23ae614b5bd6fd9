"""`cellpipe chaos`: break a cluster on purpose, and see whether anything was lost."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.progress import Teller
from services.cli.settings import DEFAULT_MODEL, load_config, with_cluster_urls
from services.cli.terminating import end_clean_at_sigterm
from services.cli.tree import EXIT_FAILED, app
from shared.errors import ConfigError
from shared.topology import Wire

if TYPE_CHECKING:
    from services.chaos.run import ChaosOptions, Progress
    from services.chaos.schedule import FaultPlan
    from services.chaos.verdict import Verdict
    from shared.config import Config

DEFAULT_FAULTS = {"kill": ["worker:2s"]}
FaultTexts = list[str] | None


def _fault(name: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, metavar="TARGET:PERIOD[:TIMES]", help=text)
    return option


@app.command()
def chaos(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A catalog name or a path to a .gguf file.")
    ] = DEFAULT_MODEL,
    groups: Annotated[int, typer.Option("--groups", "-g", min=1, help="Layer groups.")] = 3,
    wire: Annotated[Wire, typer.Option(help="How hidden states travel.")] = Wire.F32,
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Workers of each group.")
    ] = 2,
    schedulers: Annotated[int, typer.Option(min=1, help="Schedulers.")] = 1,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests", min=1, help="Requests in all. Default: 100.", show_default=False
        ),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option("--for", metavar="TIME", help="In place of --requests: ask for so long, 10m."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=256, help="Requests at a time.")] = 8,
    kill: Annotated[
        FaultTexts, _fault("--kill", "SIGKILL a worker or scheduler each PERIOD: worker:2s.")
    ] = None,
    stop: Annotated[
        FaultTexts, _fault("--stop", "SIGTERM one, which then leaves clean: worker:5s.")
    ] = None,
    freeze: Annotated[
        FaultTexts, _fault("--freeze", "SIGSTOP one, and SIGCONT it later: worker:10s.")
    ] = None,
    restart: Annotated[
        FaultTexts,
        _fault(
            "--restart",
            "Kill and restart a server: broker:30s, redis:45s (KV pages, all lost), "
            "meta:60s (records, kept), or everything:30s, with all processes.",
        ),
    ] = None,
    garbage: Annotated[
        FaultTexts, _fault("--garbage", "Publish what is no message into a queue: 5s.")
    ] = None,
    hang: Annotated[FaultTexts, _fault("--hang", "Let a worker's computation hang: 15s.")] = None,
    frozen_for: Annotated[str, typer.Option(help="Time from SIGSTOP to SIGCONT.")] = "5s",
    spare_last: Annotated[
        bool,
        typer.Option(
            "--spare-last/--spare-nobody", help="Never strike the last live worker of a group."
        ),
    ] = True,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same questions and faults.")] = 0,
    patience: Annotated[str, typer.Option(help="Silence after which a request is stuck.")] = "60s",
    memory: Annotated[str, typer.Option(help="Memory of each worker.")] = "256MiB",
    hang_limit: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which a worker counts as hung.")
    ] = 5.0,
    cluster: Annotated[
        bool,
        typer.Option(
            "--cluster",
            help="Use the servers of CELLPIPE_AMQP_URL and CELLPIPE_REDIS_URL instead of private "
            "ones; loads the model there and makes it the active one.",
        ),
    ] = False,
    logs: Annotated[
        Path | None, typer.Option(help="Keep the logs of all processes in this folder.")
    ] = None,
    predicted: Annotated[
        bool,
        typer.Option(
            "--predict",
            help="Run without faults first, let the simulator say how fast the run with them is, "
            "and end with 1 if it is off by more than 20 %.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Break a cluster on purpose and prove that nothing was lost.

    Starts servers and workers of its own, runs requests, injects faults, and compares each answer
    with an undisturbed one, token by token. Exit code 1 if anything is lost, comes twice, hangs
    or is wrong, or if the memory of a scheduler or worker that lived for 5 minutes is not flat.

    Example: cellpipe chaos --kill worker:2s --freeze worker:10s --restart broker:30s
    """
    from services.chaos.report import to_dict, to_lines
    from services.chaos.run import ChaosOptions, run_chaos
    from shared.config import parse_duration

    end_clean_at_sigterm()
    config = load_config(quiet=True)
    texts = {
        "kill": kill, "stop": stop, "freeze": freeze, "restart": restart, "garbage": garbage,
        "hang": hang,
    }  # fmt: skip
    options = ChaosOptions(
        model=model,
        faults=_plans({name: given for name, given in texts.items() if given}),
        num_groups=groups,
        wire=wire,
        workers_per_group=workers,
        num_schedulers=schedulers,
        num_requests=None if duration else requests or 100,
        duration_s=_duration(duration, requests),
        concurrency=concurrency,
        seed=seed,
        patience_s=parse_duration(patience, field="--patience"),
        frozen_s=parse_duration(frozen_for, field="--frozen-for"),
        memory=memory,
        hang_limit_s=hang_limit,
        spare_last=spare_last,
        cluster=_settings_of(config) if cluster else None,
        log_folder=logs,
    )
    teller = Teller()
    teller.say(
        f"seed {options.seed}, {_load_of(options)}, "
        f"{', '.join(f'{p.name} each {p.period_s:g} s' for p in options.faults)}"
    )
    calm = _run_calm(options, teller) if predicted else None
    verdict = run_chaos(options, say=teller.say, show=lambda seen: teller.show(_shown(seen)))
    teller.end()
    found = to_dict(verdict)
    lines = to_lines(verdict)
    is_close = True
    if calm is not None:
        from services.cli.predicted_chaos import predict, table

        prediction = predict(options, calm, verdict)
        found["prediction"] = {**asdict(prediction), "error": prediction.error}
        lines += table(prediction)
        is_close = prediction.is_close
    if as_json:
        typer.echo(json.dumps(found))
    else:
        for line in lines:
            typer.echo(line)
    if not (verdict.is_clean and is_close):
        raise typer.Exit(EXIT_FAILED)


def _run_calm(options: ChaosOptions, teller: Teller) -> Verdict:
    """The same run without faults."""
    from services.chaos.run import run_chaos
    from services.cli.predicted_chaos import check_predictable

    check_predictable(options)
    teller.say("first without faults")
    calm = replace(options, faults=(), log_folder=None)
    return run_chaos(calm, say=teller.say, show=lambda seen: teller.show(_shown(seen)))


def _duration(text: str | None, requests: int | None) -> float | None:
    from shared.config import parse_duration
    from shared.local_cluster.load import MAX_DURATION_S

    if text is None:
        return None
    if requests is not None:
        raise ConfigError(f"--for {text} and --requests {requests} are two ends: give one of them")
    duration_s = parse_duration(text, field="--for")
    if duration_s > MAX_DURATION_S:
        raise ConfigError(
            f"--for must be at most {MAX_DURATION_S / 60:g}m, for answers are on record for an "
            f"hour and are compared at the end; got {text}"
        )
    return duration_s


def _plans(given: dict[str, list[str]]) -> tuple[FaultPlan, ...]:
    from services.chaos.schedule import FaultKind, parse_fault

    return tuple(
        parse_fault(FaultKind(name), text)
        for name, texts in (given or DEFAULT_FAULTS).items()
        for text in texts
    )


def _settings_of(config: Config) -> dict[str, str]:
    """The environment that makes our processes use the same servers."""
    config = with_cluster_urls(config)
    urls = {
        "CELLPIPE_AMQP_URL": config.amqp_url,
        "CELLPIPE_REDIS_URL": config.redis_url,
        "CELLPIPE_REDIS_KV_URL": config.redis_kv_url,
        "CELLPIPE_REDIS_WEIGHTS_URL": config.redis_weights_url,
    }
    return {name: url for name, url in urls.items() if url}


def _load_of(options: ChaosOptions) -> str:
    if options.duration_s is not None:
        return f"requests for {options.duration_s:g} s"
    return f"{options.num_requests} requests"


def _shown(progress: Progress) -> str:
    wanted = "" if progress.num_requests is None else f"/{progress.num_requests}"
    return (
        f"{progress.num_ended}{wanted} answered, {progress.num_tokens} tokens, "
        f"{progress.num_faults} faults, {progress.num_alive} processes awake"
    )
