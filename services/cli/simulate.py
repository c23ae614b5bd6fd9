"""`cellpipe simulate`: what a planned cluster would do, hour by hour, with its failures.

Longer than other modules: the command has many options, and each is said once.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.plan import find_model, open_library
from services.cli.plan_options import (
    BitsOption,
    ContextOption,
    GroupsOption,
    ModelSpecOption,
    NetworkOption,
    PoolOption,
    SpecsOption,
)
from services.cli.tree import EXIT_FAILED, app
from shared.errors import ConfigError

if TYPE_CHECKING:
    from services.planner.library import Library
    from services.planner.plan import Plan
    from services.planner.specs import Pool
    from services.simulator.load import Load
    from services.simulator.simulation import Outcome, Progress
    from services.simulator.world import Resize, World

MAX_HOURS = 24.0 * 31
DEFAULT_SPARES_SHARE = 0.01
DEFAULT_REQUESTS = 10_000
MAX_RESIZE = 10_000_000
MAX_REQUESTS = 10_000_000  # each is kept whole, with its times: some GB
UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@app.command()
def simulate(
    invoked: typer.Context,
    model: ModelSpecOption = "kimi-k2",
    pool: PoolOption = "ps3:100000",
    hours: Annotated[float, typer.Option(help="Simulated hours.")] = 1.0,
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help="Requests in all. Default: 10,000, or by --rate."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second, in place of it.")] = None,
    burst: Annotated[
        float | None,
        typer.Option(help="A tenth of the time so many times as many requests: 5."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Requests from a .csv file: at_s,prompt,answer. In place of all that."),
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt, on average.")] = 128,
    answer: Annotated[int, typer.Option(min=1, help="Tokens of an answer, on average.")] = 64,
    spread: Annotated[
        float, typer.Option(min=0.0, max=3.0, help="How much both vary: deviation over mean.")
    ] = 0.5,
    bits: BitsOption = 4,
    context: ContextOption = 4096,
    groups: GroupsOption = None,
    network: NetworkOption = "auto",
    spares: Annotated[
        int | None,
        typer.Option(min=0, help="Nodes that wait to replace others. Default: 1 % of the pool."),
    ] = None,
    failures: Annotated[
        float | None,
        typer.Option(help="Failures of a node an hour. Default: those of its specs."),
    ] = None,
    outages: Annotated[
        bool, typer.Option("--outages/--no-outages", help="Racks, switches and power fail too.")
    ] = True,
    flaky: Annotated[float, typer.Option(help="Times an hour that a node turns flaky.")] = 0.0,
    resize: Annotated[
        list[str] | None,
        typer.Option(metavar="TIME:NODES", help="Add or drain nodes: 20m:+1000, 40m:-500."),
    ] = None,
    variation: Annotated[
        float, typer.Option(min=0.0, max=5.0, help="Deviation over mean of a turn's time.")
    ] = 0.1,
    article: Annotated[
        bool,
        typer.Option(
            "--article",
            help="In place of a plan: 10 nodes, 15 % crash, 3 retries, and cellpipe in that world.",
        ),
    ] = False,
    growth: Annotated[
        str | None,
        typer.Option(
            metavar="NODES,NODES…",
            help="Simulate pools of so many nodes, requests in proportion, and tell what it costs.",
        ),
    ] = None,
    cost: Annotated[bool, typer.Option("--cost", hidden=True)] = False,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same run, byte for byte.")] = 0,
    specs: SpecsOption = None,
    plot: Annotated[Path | None, typer.Option(help="Write a PNG (needs matplotlib).")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with plots (matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run a plan as discrete events: requests, queues, congestion, failures, recovery.

    What becomes of a lost step is decided by the code that schedulers and workers run. Ends with 0
    if no request is lost, 1 if one is or if the plan is impossible, 2 for what cannot be asked.

    Example: cellpipe simulate --model kimi-k2 --pool ps3:100000 --hours 1 --requests 10000
    """
    from services.simulator.plots import check_plot, draw, write_html
    from services.simulator.report import to_dict, to_lines
    from services.simulator.simulation import Simulation

    _refuse_idle(invoked, article=article, growth=growth, trace=trace)
    if article:
        _show_article(requests or DEFAULT_REQUESTS, seed=seed, as_json=as_json)
        return
    _check_numbers(hours=hours, rate=rate, burst=burst, failures=failures, flaky=flaky)
    if plot is not None:
        check_plot(plot, "--plot")
    if html is not None:
        check_plot(html, "--html")
    if growth is not None:
        _show_growth(growth, model, pool, requests or DEFAULT_REQUESTS, hours, seed, plot, as_json)
        return
    library = open_library(specs or [])
    plan, whole_pool = _plan(
        library, model, pool, network, spares, bits=bits, context=context, groups=groups
    )
    world = _world(
        plan,
        whole_pool,
        position=min(context, prompt + answer // 2),
        failures=failures,
        has_outages=outages,
        flaky=flaky,
        resizes=tuple(_resize(text) for text in resize or []),
        variation=variation,
    )
    load = _load(
        trace, requests, rate, burst, hours=hours, prompt=prompt, answer=answer, spread=spread,
        context=context, seed=seed,
    )  # fmt: skip
    if cost:
        from services.cli.simulate_growth import cost as cost_of

        found = cost_of(Simulation(world, load, horizon_s=hours * 3600, seed=seed))
        typer.echo(json.dumps(found))
        return
    bar = _Bar()
    began_s = time.monotonic()
    outcome = Simulation(world, load, horizon_s=hours * 3600, seed=seed, show=bar.show).run()
    bar.end()
    _tell(outcome, time.monotonic() - began_s)
    if plot is not None:
        draw(outcome, plot)
    if html is not None:
        write_html(outcome, html)
    if as_json:
        typer.echo(json.dumps(to_dict(outcome)))
    else:
        for line in to_lines(outcome):
            typer.echo(line)
    if outcome.lost:
        raise typer.Exit(EXIT_FAILED)


OF_ARTICLE = frozenset({"article", "requests", "seed", "as_json"})
OF_GROWTH = frozenset(
    {"growth", "model", "pool", "requests", "hours", "seed", "plot", "as_json"},
)
NOT_OF_TRACE = frozenset({"requests", "rate", "burst", "prompt", "answer", "spread"})


def _refuse_idle(
    invoked: typer.Context, *, article: bool, growth: str | None, trace: Path | None
) -> None:
    """Raise `ConfigError` naming an option that was given and would do nothing."""
    for parameter in invoked.command.params:
        name, source = parameter.name or "", invoked.get_parameter_source(parameter.name or "")
        if source is None or source.name != "COMMANDLINE":
            continue
        option = parameter.opts[0]
        if article and name not in OF_ARTICLE:
            raise ConfigError(f"--article is a world of its own: {option} does nothing there")
        if growth is not None and not article and name not in OF_GROWTH:
            raise ConfigError(f"--growth {growth} takes no {option}")
        if trace is not None and name in NOT_OF_TRACE:
            raise ConfigError(f"--trace {trace} says what comes and when: {option} does nothing")


def _show_article(num_tasks: int, *, seed: int, as_json: bool) -> None:
    from dataclasses import asdict

    from services.simulator.article import Article, compare, table

    rows = compare(Article(num_tasks=num_tasks), seed=seed)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows]))
        return
    for line in table(rows):
        typer.echo(line)
    typer.echo("failed: its requester was told why; lost: nobody was")


def _show_growth(
    text: str,
    model: str,
    pool: str,
    requests: int,
    hours: float,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """`requests` are those of `pool`, which has one kind of nodes; each size has its share."""
    from services.cli.simulate_growth import grow, growth_lines, parse_sizes
    from services.simulator.plots import draw_growth

    name, _, number = pool.partition(":")
    if "," in pool or not number.isdigit():
        raise ConfigError(f"--growth needs a --pool of one kind such as ps3:100000, got {pool!r}")
    per_node = requests / int(number)

    def arguments(size: int) -> list[str]:
        asked = max(1, round(per_node * size))
        return [
            "--model", model, "--pool", f"{name}:{size}", "--hours", str(hours),
            "--requests", str(asked), "--seed", str(seed),
        ]  # fmt: skip

    rows = []
    for row in grow(parse_sizes(text), arguments):
        rows.append(row)
        print(f"{row['nodes']:,} nodes: {row['wall_s']:.1f} s", file=sys.stderr, flush=True)
    if plot is not None:
        draw_growth(rows, plot)
    if as_json:
        typer.echo(json.dumps(rows))
        return
    for line in growth_lines(rows):
        typer.echo(line)


def _plan(
    library: Library,
    model: str,
    pool: str,
    network: str,
    spares: int | None,
    *,
    bits: int,
    context: int,
    groups: int | None,
) -> tuple[Plan, Pool]:
    """The plan of what the spares leave, and the whole pool. Ends the command if there is none."""
    from services.cli.simulated_world import without_spares
    from services.planner.missing import Impossible
    from services.planner.placement import Wishes
    from services.planner.plan import make_plan
    from services.planner.question import DEFAULT_PROMPT, Question
    from services.planner.report import impossible_lines

    whole = library.parse_pool(pool, network=network)
    num_spares = int(whole.num_nodes * DEFAULT_SPARES_SHARE) if spares is None else spares
    question = Question(
        bits=bits,
        context=context,
        prompt=min(DEFAULT_PROMPT, context),
        wishes=Wishes(groups=groups),
    )
    found = make_plan(find_model(library, model), without_spares(whole, num_spares), question)
    if isinstance(found, Impossible):
        for line in impossible_lines(found):
            typer.echo(line, err=True)
        raise typer.Exit(EXIT_FAILED)
    return found, whole


def _world(
    plan: Plan,
    pool: Pool,
    *,
    position: int,
    failures: float | None,
    has_outages: bool,
    flaky: float,
    resizes: tuple[Resize, ...],
    variation: float,
) -> World:
    from dataclasses import replace

    from services.cli.simulated_world import world_of

    world = world_of(plan, pool, position=position, failures_per_hour=failures)
    broken = replace(world.failures, flaky_per_node_hour=flaky)
    if not has_outages:
        broken = replace(broken, domains=())
    return replace(world, failures=broken, resizes=resizes, variation=variation)


def _load(
    trace: Path | None,
    requests: int | None,
    rate: float | None,
    burst: float | None,
    *,
    hours: float,
    prompt: int,
    answer: int,
    spread: float,
    context: int,
    seed: int,
) -> Load:
    from services.simulator.draws import streams
    from services.simulator.load import Bursty, Poisson, Sizes, drawn_load, fit_context, read_trace

    if trace is not None:
        load = read_trace(trace, context=context)
        if load.asked[0].at_s >= hours * 3600:
            raise ConfigError(
                f"--trace {trace}: its first request comes at {load.asked[0].at_s:,.0f} s, "
                f"after the end (--hours {hours:g})"
            )
        return load
    if prompt + answer > context:
        raise ConfigError(
            f"--prompt {prompt} and --answer {answer} must fit --context {context} together"
        )
    if requests is not None and rate is not None:
        raise ConfigError(f"--requests {requests} and --rate {rate:g} both say how many: give one")
    if rate is not None:
        requests = max(1, round(rate * hours * 3600))
    number = requests or DEFAULT_REQUESTS
    if number > MAX_REQUESTS:
        raise ConfigError(f"there may be {MAX_REQUESTS:,} requests in all, got {number:,}")
    per_s = number / (hours * 3600)
    rngs = streams(seed)
    load = drawn_load(
        Poisson(per_s) if burst is None else Bursty(per_s, peak=burst),
        Sizes(prompt, answer, spread),
        number,
        arrivals_rng=rngs["arrivals"],
        sizes_rng=rngs["sizes"],
    )
    return fit_context(load, context)


def _check_numbers(
    *,
    hours: float,
    rate: float | None,
    burst: float | None,
    failures: float | None,
    flaky: float,
) -> None:
    for name, value, low, high in (
        ("--hours", hours, 1e-4, MAX_HOURS),
        ("--rate", rate, 1e-6, 1e6),
        ("--burst", burst, 1.0, 10.0),
        ("--failures", failures, 0.0, 3600.0),
        ("--flaky", flaky, 0.0, 3600.0),
    ):
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name} must be in {low:g}..{high:g}, got {value:g}")


def _resize(text: str) -> Resize:
    """Read "20m:+1000". Raises `ConfigError` naming the option and the text."""
    from services.simulator.world import Resize

    at, _, number = text.partition(":")
    unit = at[-1:] if at[-1:] in UNITS_S else ""
    try:
        at_s = float(at.removesuffix(unit)) * UNITS_S.get(unit, 1.0)
        num_nodes = int(number)
    except ValueError:
        at_s, num_nodes = -1.0, 0
    if not 0.0 <= at_s <= MAX_HOURS * 3600 or not 1 <= abs(num_nodes) <= MAX_RESIZE:
        raise ConfigError(
            f"--resize must be TIME:NODES such as 20m:+1000, got {text!r:.80}",
            remedy=f"of 1 to {MAX_RESIZE:,} nodes, within {MAX_HOURS:g} hours",
        )
    return Resize(at_s, num_nodes)


class _Bar:
    """The simulated time, on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not sys.stderr.isatty(),
        )
        self._progress.start()
        self._task = self._progress.add_task("", total=1.0)

    def show(self, seen: Progress) -> None:
        share = min(1.0, seen.now_s / seen.horizon_s)
        if seen.now_s > seen.horizon_s:
            share = seen.num_ended / max(1, seen.num_requests)
        self._progress.update(
            self._task,
            completed=share,
            description=f"{seen.num_ended:,} of {seen.num_requests:,} requests, "
            f"{seen.num_running:,} running",
        )

    def end(self) -> None:
        self._progress.stop()


def _tell(outcome: Outcome, took_s: float) -> None:
    print(
        f"simulated {outcome.figures.ended_s:,.0f} s of {outcome.num_nodes:,} nodes "
        f"in {took_s:.1f} s",
        file=sys.stderr,
    )
