"""Reads the state of a cluster for `cellpipe status`. Changes nothing."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.broker.base import Broker
from shared.config import Config
from shared.errors import CellpipeError, ConfigError, ModelError
from shared.store.connection import Stores, connect
from shared.store.presence import Presence
from shared.store.presence_types import STAGES, SchedulerInfo, WorkerInfo
from shared.store.shards import ShardStore
from shared.topology import (
    BATCH_QUEUE,
    DEAD_QUEUE,
    REQUESTS_QUEUE,
    Layout,
    check_layout,
    group_bytes,
    group_queue,
)


@dataclass
class GroupState:
    group: int
    first_layer: int
    end_layer: int
    shard_bytes: int
    num_workers: int
    queue_depth: int | None


@dataclass
class Overview:
    """What is up. `problems` says in words what is missing; empty means that requests run."""

    broker_up: bool = False
    redis_up: bool = False
    model_id: str = ""
    layout_id: str = ""
    groups: list[GroupState] = field(default_factory=list)
    workers: list[WorkerInfo] = field(default_factory=list)
    schedulers: list[SchedulerInfo] = field(default_factory=list)
    requests_waiting: int | None = None
    batch_requests_waiting: int | None = None
    dead_letters: int | None = None
    problems: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        shown = asdict(self)
        for entry, worker in zip(shown["workers"], self.workers, strict=True):
            del entry["stage_us"]
            entry["stages_us"] = mean_stages_us(worker)
        return shown


def read_overview(config: Config) -> Overview:
    """Ask every server once; what does not answer becomes a problem, not an exception."""
    overview = Overview()
    assert config.redis_url is not None
    assert config.amqp_url is not None
    stores = connect(config.redis_url, config.redis_kv_url, config.redis_weights_url)
    try:
        stores.ping()
        overview.redis_up = True
        layout = _read_store(overview, stores)
    except ModelError as error:
        layout = None
        overview.problems.append(f"{error}; {error.remedy}")
    except ConfigError:
        raise
    except CellpipeError as error:
        layout = None
        overview.problems.append(str(error))
    finally:
        stores.close()
    _read_broker(overview, config.amqp_url, layout)
    return overview


def _read_store(overview: Overview, stores: Stores) -> Layout:
    presence = Presence(stores.meta)
    overview.schedulers = presence.schedulers()
    shards = ShardStore(stores.weights)
    layout = shards.active_layout("")
    manifest = shards.get_manifest(layout.model_id).checked()
    check_layout(layout, manifest)
    overview.model_id, overview.layout_id = layout.model_id, layout.layout_id
    overview.workers = presence.workers(layout)
    for group, num_workers in enumerate(presence.coverage(layout)):
        first, end = layout.bounds[group]
        size = group_bytes(manifest, layout, group)
        overview.groups.append(GroupState(group, first, end, size, num_workers, None))
        if num_workers == 0:
            overview.problems.append(
                f"layer group {group} has no worker; start one: cellpipe worker --group {group}"
            )
    if not overview.schedulers:
        overview.problems.append("no scheduler runs; start one: cellpipe scheduler")
    return layout


def _read_broker(overview: Overview, amqp_url: str, layout: Layout | None) -> None:
    from shared.broker.rabbitmq import RabbitmqBroker

    try:
        broker: Broker = RabbitmqBroker.connect(amqp_url)
    except ConfigError:
        raise
    except CellpipeError as error:
        overview.problems.insert(0, str(error))  # nothing runs without it
        return
    try:
        overview.broker_up = True
        overview.requests_waiting = broker.depth(REQUESTS_QUEUE)
        overview.batch_requests_waiting = broker.depth(BATCH_QUEUE)
        overview.dead_letters = broker.depth(DEAD_QUEUE)
        for state in overview.groups:
            assert layout is not None, "groups come from a layout"
            queue = group_queue(layout.model_id, layout.layout_id, state.group)
            state.queue_depth = broker.depth(queue)
    finally:
        broker.close()


def mean_stages_us(worker: WorkerInfo) -> dict[str, float]:
    """What a decode step waits for at a worker, on average; empty before its first one."""
    if not worker.num_decode_steps:
        return {}
    return {
        name: round(total_us / worker.num_decode_steps, 1)
        for name, total_us in zip(STAGES, worker.stage_us, strict=False)
    }


def _known(number: int | None) -> str:
    return "-" if number is None else str(number)


def print_overview(overview: Overview) -> None:
    """Draw it for a person."""
    from rich.console import Console
    from rich.table import Table

    # Piped, a line must stay a line for grep.
    console = Console(width=None if sys.stdout.isatty() else 160)
    up = {True: "[green]up[/green]", False: "[red]down[/red]"}
    console.print(f"RabbitMQ {up[overview.broker_up]}, Redis {up[overview.redis_up]}")
    if overview.groups:
        # Not the title of the table: that is wrapped to its width.
        console.print(f"{overview.model_id}, layout {overview.layout_id}", soft_wrap=True)
        groups = Table("group", "layers", "shards MB", "workers", "queued")
        for state in overview.groups:
            groups.add_row(
                str(state.group),
                f"{state.first_layer}..{state.end_layer - 1}",
                f"{state.shard_bytes / 1e6:.1f}",
                str(state.num_workers),
                _known(state.queue_depth),
            )
        console.print(groups)
    if overview.workers:
        workers = Table(
            "worker", "state", "groups", "shards MB", "RSS MB", "peak MB", "steps",
            title="workers",
        )  # fmt: skip
        for worker in overview.workers:
            workers.add_row(
                worker.worker_id,
                worker.state,
                ",".join(map(str, worker.groups)),
                f"{worker.shard_bytes / 1e6:.1f}",
                f"{worker.rss_bytes / 1e6:.1f}",
                f"{worker.peak_rss_bytes / 1e6:.1f}",
                str(worker.num_steps),
            )
        console.print(workers)
    for scheduler in overview.schedulers:
        console.print(
            f"scheduler {scheduler.scheduler_id}: {scheduler.num_requests} requests in flight, "
            f"{scheduler.num_waiting} of them wait for room; "
            f"{scheduler.num_redrives} lost steps sent again"
        )
    console.print(
        f"requests waiting: {_known(overview.requests_waiting)}, "
        f"of batches: {_known(overview.batch_requests_waiting)}, "
        f"dead letters: {_known(overview.dead_letters)}"
    )
    for problem in overview.problems:
        console.print(f"[red]problem:[/red] {problem}")
