"""One run from start to end: servers, model, reference, cluster, load with faults, verdict."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from services.chaos.faults import Faults
from services.chaos.findings import (
    judge_leftovers,
    observe,
    wait_for_letters,
    wait_until_settled,
)
from services.chaos.memory import growing, rss_trends
from services.chaos.questions import draw_questions
from services.chaos.reference import ReferenceModel
from services.chaos.schedule import FaultKind, FaultPlan, faults_of
from services.chaos.verdict import (
    Verdict,
    judge_requests,
    recoveries,
    slowest_waits,
)
from shared.dead_queue import DeadQueue
from shared.local_cluster.load import Load, Question
from shared.local_cluster.processes import Crew, cpu_s_of, rss_bytes_of
from shared.local_cluster.servers import GivenServers, PrivateServers, Servers
from shared.local_cluster.start import connections, wait_until_serving
from shared.model.backend import pick_backend
from shared.producer import Producer
from shared.store.ledger import Ledger
from shared.store.presence import Presence
from shared.store.shards import ShardStore
from shared.topology import REQUESTS_QUEUE, Layout, Wire, group_queue

TURN_S = 0.05
SHOW_S = 2.0
SAMPLE_S = 1.0


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What the user asked for. `cluster` are the settings of servers that exist (None: private)."""

    model: str
    faults: tuple[FaultPlan, ...]
    num_groups: int = 3
    wire: Wire = Wire.F32
    workers_per_group: int = 2
    num_schedulers: int = 1
    num_requests: int | None = 100  # None: as many as come in `duration_s`
    duration_s: float | None = None
    concurrency: int = 8
    seed: int = 0
    patience_s: float = 60.0
    frozen_s: float = 5.0
    memory: str = "256MiB"
    hang_limit_s: float = 5.0
    spare_last: bool = True
    cluster: dict[str, str] | None = None
    log_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run is, a few times a minute."""

    num_ended: int
    num_requests: int | None
    num_tokens: int
    num_faults: int
    num_alive: int


def run_chaos(
    options: ChaosOptions,
    *,
    say: Callable[[str], None],
    show: Callable[[Progress], None],
) -> Verdict:
    """Run it all. `say` hears of each event, `show` of the progress.

    Raises `ConfigError` when it cannot start: no servers, no such model, workers that do not serve.
    """
    began_s = time.monotonic()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cellpipe-chaos-")))
        logs = options.log_folder or folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        say("starting servers" if options.cluster is None else "using the servers of the cluster")
        servers = _servers(options, folder)
        stack.callback(servers.close)
        crew = stack.enter_context(Crew(servers.settings, logs, can_hang=True))
        crew.run("load", options.model, "--groups", str(options.num_groups), "--wire", options.wire)
        stores, broker = stack.enter_context(connections(servers.settings))
        shards = ShardStore(stores.weights)
        layout = shards.active_layout("")
        questions, expected = _answer_undisturbed(options, shards, layout, say)
        _start_crew(options, crew, layout, Presence(stores.meta), say)
        start_cpu_s = _start_cpu_s(crew)
        queues = [REQUESTS_QUEUE] + [
            group_queue(layout.model_id, layout.layout_id, g) for g in range(layout.num_groups)
        ]
        dead_queue = DeadQueue(broker, Ledger.of(stores))
        dead_before = {letter.letter_id for letter in dead_queue.letters()}
        load = Load(
            Producer(broker, Ledger.of(stores), patience_s=0.0),  # the load tries again itself
            questions,
            num_requests=options.num_requests,
            duration_s=options.duration_s,
            concurrency=options.concurrency,
            patience_s=options.patience_s,
            model_id=layout.model_id,
        )
        faults = Faults(
            crew,
            servers,
            broker,
            queues,
            clock=time.monotonic,
            say=say,
            frozen_s=options.frozen_s,
            spare_last=options.spare_last,
        )
        samples = _disturb(options, crew, servers, faults, load, show)
        say("the load is over; looking at what is left")
        leaked = wait_until_settled(broker, stores, queues, load.sightings, tend=crew.tend)
        observations = observe(load.sightings, questions, expected, Ledger.of(stores))
        verdict = judge_requests(observations)
        verdict.start_cpu_s = start_cpu_s
        verdict.sizes = [(seen.num_prompt, len(seen.expected)) for seen in observations]
        verdict.num_tokens = sum(len(seen.stored) for seen in observations)
        ends = [seen.finished_s for seen in load.sightings if seen.finished_s is not None]
        began = [seen.submitted_s for seen in load.sightings]
        verdict.load_s = max(ends, default=0.0) - min(began, default=0.0) if ends else 0.0
        verdict.recovery = recoveries(observations, faults.log.injected)
        verdict.slowest = slowest_waits(observations, faults.log.injected, began_s=began_s)
        verdict.queues = {queue: broker.depth(queue) or 0 for queue in queues}
        letters = wait_for_letters(dead_queue, dead_before, faults.log.garbage)
        verdict.num_leaked_keys = len(leaked)
        verdict.rss = rss_trends(samples)
        verdict.problems += growing(verdict.rss)
        judge_leftovers(verdict, options.faults, faults.log, crew.own_deaths, leaked, letters)
        return verdict


def _servers(options: ChaosOptions, folder: Path) -> Servers:
    if options.cluster is None:
        return PrivateServers(folder)
    if restarts := [plan for plan in options.faults if plan.kind is FaultKind.RESTART]:
        GivenServers(options.cluster).restart(restarts[0].target)  # raises, and says why
    return GivenServers(options.cluster)


def _answer_undisturbed(
    options: ChaosOptions, shards: ShardStore, layout: Layout, say: Callable[[str], None]
) -> tuple[list[Question], list[tuple[int, ...]]]:
    manifest = shards.get_manifest(layout.model_id)
    model = ReferenceModel(
        manifest,
        lambda name: shards.read_shard(manifest, name),
        pick_backend(num_threads=2),
        layout=layout,
    )
    questions = draw_questions(
        options.num_requests,
        options.seed,
        vocab_size=model.config.vocab_size,
        max_positions=model.config.max_position_embeddings,
    )
    say(f"answering {len(questions)} questions undisturbed")
    answers = model.generate_all([(question.prompt, question.sampling) for question in questions])
    return questions, [tuple(answer) for answer in answers]


def _start_crew(
    options: ChaosOptions,
    crew: Crew,
    layout: Layout,
    presence: Presence,
    say: Callable[[str], None],
) -> None:
    say(
        f"starting {options.num_schedulers} scheduler(s) and {options.num_groups} x "
        f"{options.workers_per_group} workers"
    )
    for number in range(options.num_schedulers):
        crew.add("scheduler", f"scheduler-{number}", "scheduler")
    for group in range(options.num_groups):
        for number in range(options.workers_per_group):
            arguments = ["worker", "--group", str(group), "--memory", options.memory]
            if any(plan.kind is FaultKind.HANG for plan in options.faults):
                arguments += ["--hang-limit", str(options.hang_limit_s)]
            crew.add("worker", f"worker-{group}.{number}", *arguments, group=group)
    wait_until_serving(crew, layout, presence)


def _start_cpu_s(crew: Crew) -> float | None:
    """What the workers have taken of a core until they all serve, on average."""
    taken = [cpu_s for m in crew.of("worker") if (cpu_s := cpu_s_of(m.pid)) is not None]
    return sum(taken) / len(taken) if taken else None


def _disturb(
    options: ChaosOptions,
    crew: Crew,
    servers: Servers,
    faults: Faults,
    load: Load,
    show: Callable[[Progress], None],
) -> dict[str, list[tuple[float, int]]]:
    """Run the load with its faults; returns the memory of each process over time."""
    samples: dict[str, list[tuple[float, int]]] = {}
    due = faults_of(options.faults, options.seed)
    upcoming = next(due, None)
    began_s = time.monotonic()
    next_show_s = next_sample_s = 0.0
    load.start()
    try:
        while load.is_running():
            elapsed_s = time.monotonic() - began_s
            while upcoming is not None and upcoming.at_s <= elapsed_s:
                faults.inject(upcoming)
                upcoming = next(due, None)
            faults.tend(time.monotonic())
            crew.tend(time.monotonic())
            if elapsed_s >= next_sample_s:
                next_sample_s = elapsed_s + SAMPLE_S
                for name, rss in _memory(crew, servers):
                    samples.setdefault(name, []).append((elapsed_s, rss))
            if elapsed_s >= next_show_s:
                next_show_s = elapsed_s + SHOW_S
                show(_progress(options, crew, faults, load))
            time.sleep(TURN_S)
    finally:
        load.stop()
        faults.finish()
    show(_progress(options, crew, faults, load))
    return samples


def _memory(crew: Crew, servers: Servers) -> Iterator[tuple[str, int]]:
    """Bytes of each process, by role/process."""
    for member, rss in crew.rss_bytes():
        yield f"{member.role}/{member.name} (pid {member.pid})", rss
    for target, pid in servers.pids().items():
        if (server_rss := rss_bytes_of(pid)) is not None:
            yield f"server/{target} (pid {pid})", server_rss


def _progress(options: ChaosOptions, crew: Crew, faults: Faults, load: Load) -> Progress:
    return Progress(
        num_ended=sum(s.finished_s is not None for s in load.sightings),
        num_requests=options.num_requests,
        num_tokens=sum(len(s.tokens) for s in load.sightings),
        num_faults=len(faults.log.injected),
        num_alive=sum(m.is_alive and not m.is_stuck for m in crew.members),
    )
