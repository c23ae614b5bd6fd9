"""The RabbitMQ and Redis of one run: private ones that may be killed, or those of a cluster.

Private servers are started by the script `infra/servers` of a checkout, which an installed wheel
has not. Redis runs twice: *meta* keeps its data over a restart, *kv* loses it.
"""

from __future__ import annotations

import shutil
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Protocol

from shared.errors import ConfigError
from shared.local_cluster.processes import ROOT

SCRIPT = ROOT / "infra" / "servers"
EVERYTHING = "everything"  # as a target of `restart`: all servers
# target of `--restart` -> (data folder, service of the script, whether its data survives)
_PLACES = {
    "broker": ("meta", "rabbitmq", True),
    "meta": ("meta", "redis", True),
    "redis": ("kv", "redis", False),
}


class Servers(Protocol):
    """Where the servers are."""

    settings: dict[str, str]

    def restart(self, target: str) -> None:
        """Kill a server, or all of them, start it again and return when its port answers."""

    def pids(self) -> dict[str, int]:
        """The process of each server that is ours, by the target that restarts it."""

    def close(self) -> None: ...


class GivenServers:
    """Servers that were there before, and are left alone."""

    def __init__(self, settings: dict[str, str]) -> None:
        self.settings = settings

    def restart(self, target: str) -> None:
        raise ConfigError(
            f"--restart {target} ends a server, and only those that `cellpipe chaos` started are "
            "ended: leave --cluster out"
        )

    def pids(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        """They go on."""


class PrivateServers:
    """Servers in a folder of this run, on loopback."""

    def __init__(self, folder: Path) -> None:
        """Raises `ConfigError` without the script or the software."""
        self._script = _load_script()
        self._folder = folder
        try:
            self._script.require_software(("rabbitmq", "redis"), False)
        except self._script.ServersError as error:
            raise ConfigError(str(error)) from None
        try:
            main = self._up("meta", ("rabbitmq", "redis"), {})
            kv = self._up("kv", ("redis",), {})
        except BaseException:  # whoever interrupts us between the two has nothing to close
            self.close()
            raise
        self.settings = {
            "CELLPIPE_AMQP_URL": str(main["amqp_url"]),
            "CELLPIPE_REDIS_URL": str(main["redis_url"]),
            "CELLPIPE_REDIS_KV_URL": str(kv["redis_url"]),
        }

    def restart(self, target: str) -> None:
        places = _PLACES.values() if target == EVERYTHING else [_PLACES[target]]
        for place, service, keeps_data in places:
            state = self._script.read_state(self._folder / place)
            self._script.stop(state["processes"][service], kill=True)
            if not keeps_data:
                shutil.rmtree(self._folder / place / service, ignore_errors=True)
        for place, service, _ in places:
            state = self._script.read_state(self._folder / place)
            self._up(place, (service,), {service: state[f"{service}_port"]})

    def pids(self) -> dict[str, int]:
        states = {place: self._script.read_state(self._folder / place) for place in ("meta", "kv")}
        return {
            target: int(states[place]["processes"][service]["pid"])
            for target, (place, service, _) in _PLACES.items()
            if service in states[place]["processes"]
        }

    def close(self) -> None:
        for place in ("meta", "kv"):
            self._script.down(self._folder / place, kill=True, report=_silent)

    def _up(
        self, place: str, services: tuple[str, ...], ports: dict[str, int]
    ) -> dict[str, object]:
        try:
            state: dict[str, object] = self._script.up(
                self._folder / place, ports=ports, services=services, report=_silent
            )
        except self._script.ServersError as error:
            raise ConfigError(str(error)) from None
        return state


def _load_script() -> ModuleType:
    """`infra/servers` as a module: it has no suffix and no package."""
    if not SCRIPT.is_file():
        raise ConfigError(
            "this installation has no infra/servers to start private servers with",
            remedy="run from a checkout; `cellpipe chaos --cluster` takes servers of your own",
        )
    loader = SourceFileLoader("cellpipe_servers", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def _silent(_: str) -> None:
    """The servers' own progress is not for our user."""
