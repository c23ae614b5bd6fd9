"""Connects to the servers of a run and waits until its processes serve."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from shared.broker.base import Broker
from shared.broker.rabbitmq import RabbitmqBroker
from shared.errors import ConfigError
from shared.local_cluster.processes import Crew
from shared.store.connection import Stores, connect
from shared.store.presence import Presence
from shared.store.presence_types import WorkerState
from shared.topology import Layout

LOOK_S = 0.05
START_PATIENCE_S = 120.0


@contextmanager
def connections(settings: Mapping[str, str]) -> Iterator[tuple[Stores, Broker]]:
    """Connections to the servers that the settings of a `Servers` name."""
    stores = connect(
        settings["CELLPIPE_REDIS_URL"],
        settings.get("CELLPIPE_REDIS_KV_URL"),
        settings.get("CELLPIPE_REDIS_WEIGHTS_URL"),
    )
    try:
        broker = RabbitmqBroker.connect(settings["CELLPIPE_AMQP_URL"])
        try:
            yield stores, broker
        finally:
            broker.close()
    finally:
        stores.close()


def wait_until_serving(crew: Crew, layout: Layout, presence: Presence) -> None:
    """Return when every member of the crew serves the layout.

    Raises `ConfigError` with what the first dead one said, or after two minutes.
    """
    pids = {member.pid for member in crew.members}
    deadline_s = time.monotonic() + START_PATIENCE_S
    while True:
        serving = {w.pid for w in presence.workers(layout) if w.state is WorkerState.SERVING}
        if pids <= serving | {scheduler.pid for scheduler in presence.schedulers()}:
            return
        dead = [member for member in crew.members if not member.is_alive]
        if dead or time.monotonic() > deadline_s:
            crew.tend(time.monotonic())
            said = crew.own_deaths[0].log_tail if crew.own_deaths else "no answer in time"
            raise ConfigError(f"the cluster does not come up: {said}")
        time.sleep(LOOK_S)
