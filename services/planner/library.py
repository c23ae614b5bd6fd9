"""All specs there are by name: those of this package, and those of users' files.

A user's file may hold [hardware.NAME], [network.NAME], [servers.NAME], [model.NAME] and a [pool]
with `network`, `servers` and [[pool.nodes]], each with `hardware` and `count`. Its names go before
ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

from services.planner.read_specs import read_model, read_network, read_node, read_servers
from services.planner.specs import (
    ModelSpec,
    NetworkSpec,
    NodeCount,
    NodeSpec,
    Pool,
    ServerSpec,
)
from services.planner.toml_table import Table, read_table
from shared.errors import ConfigError

DATA = Path(__file__).parent / "data"
DEFAULT_SERVERS = "measured"
SMALL_NETWORK = "gigabit"
LARGE_NETWORK = "datacenter"
MAX_SWITCH_NODES = 48  # ports of a usual switch: where nobody names a network, more need several
MAX_NODES = 100_000_000

_Spec = TypeVar("_Spec")


@dataclass(slots=True)
class Library:
    """Specs by name; the look-ups raise `ConfigError` that lists the names there are."""

    models: dict[str, ModelSpec] = field(default_factory=dict)
    nodes: dict[str, NodeSpec] = field(default_factory=dict)
    networks: dict[str, NetworkSpec] = field(default_factory=dict)
    servers: dict[str, ServerSpec] = field(default_factory=dict)

    def model(self, name: str) -> ModelSpec:
        return _find("model", name, self.models)

    def node(self, name: str) -> NodeSpec:
        return _find("hardware", name, self.nodes)

    def network(self, name: str) -> NetworkSpec:
        return _find("network", name, self.networks)

    def server(self, name: str) -> ServerSpec:
        return _find("servers", name, self.servers)

    def add_file(self, path: Path) -> Pool | None:
        """Take a user's file; gives the pool that it describes, if any.

        Raises `ConfigError` naming file, field and value.
        """
        table = read_table(path)
        for name, entry in table.table("hardware", required=False).items():
            self.nodes[name] = read_node(name, entry)
        for name, entry in table.table("network", required=False).items():
            self.networks[name] = read_network(name, entry)
        for name, entry in table.table("servers", required=False).items():
            self.servers[name] = read_servers(name, entry)
        for name, entry in table.table("model", required=False).items():
            self.models[name] = read_model(name, entry)
        pool = self._read_pool(table.table("pool"), path.stem) if "pool" in table else None
        table.done()
        return pool

    def _read_pool(self, table: Table, name: str) -> Pool:
        counts = []
        for row in table.tables("nodes"):
            hardware = row.text("hardware")
            if hardware not in self.nodes:
                raise row.error("hardware", f"must be {_names(self.nodes)}, got {hardware!r:.80}")
            counts.append(NodeCount(self.nodes[hardware], row.whole("count")))
            row.done()
        network = table.text("network", "auto")
        servers = table.text("servers", "auto")
        if network != "auto" and network not in self.networks:
            raise table.error("network", f"must be {_names(self.networks)}, got {network!r:.80}")
        if servers != "auto" and servers not in self.servers:
            raise table.error("servers", f"must be {_names(self.servers)}, got {servers!r:.80}")
        table.done()
        return self.pool(name, counts, network=network, servers=servers)

    def pool(
        self,
        name: str,
        counts: list[NodeCount],
        *,
        network: str = "auto",
        servers: str = "auto",
    ) -> Pool:
        """A pool of these nodes; "auto" takes what was calibrated with them, or the usual."""
        num_nodes = sum(kind.count for kind in counts)
        if not 1 <= num_nodes <= MAX_NODES:
            raise ConfigError(f"a pool has 1 to {MAX_NODES:,} nodes, got {num_nodes:,}")
        measured_here = {kind.node.name for kind in counts if kind.node.host_cores}
        if network == "auto":
            usual = LARGE_NETWORK if num_nodes > MAX_SWITCH_NODES else SMALL_NETWORK
            network = next((n for n in sorted(measured_here) if n in self.networks), usual)
        if servers == "auto":
            servers = next((n for n in sorted(measured_here) if n in self.servers), DEFAULT_SERVERS)
        merged: dict[str, NodeCount] = {}
        for kind in counts:
            before = merged.get(kind.node.name)
            merged[kind.node.name] = NodeCount(
                kind.node, kind.count + (before.count if before else 0)
            )
        return Pool(name, tuple(merged.values()), self.network(network), self.server(servers))

    def parse_pool(self, text: str, *, network: str = "auto", servers: str = "auto") -> Pool:
        """`ps3:100000,rpi5:12`, or the path of a file that has a [pool].

        Raises `ConfigError` naming the piece at fault.
        """
        if text.endswith(".toml"):
            pool = self.add_file(Path(text))
            if pool is None:
                raise ConfigError(f"{text}: pool is missing")
            if network != "auto" or servers != "auto":
                return self.pool(
                    pool.name,
                    list(pool.nodes),
                    network=network if network != "auto" else pool.network.name,
                    servers=servers if servers != "auto" else pool.servers.name,
                )
            return pool
        counts = []
        for piece in text.split(","):
            name, colon, number = piece.strip().partition(":")
            plain = number.strip().replace("_", "")
            if not name or not colon or not (plain.isascii() and plain.isdigit()) or int(plain) < 1:
                raise ConfigError(
                    f"--pool must be such as ps3:100000,rpi5:12 or a .toml file, got {piece!r:.80}"
                )
            counts.append(NodeCount(self.node(name.strip()), int(plain)))
        return self.pool(text, counts, network=network, servers=servers)


def builtin_library() -> Library:
    """The specs of this package, in a library of the caller's own."""
    ours = _read_builtin()
    return Library(dict(ours.models), dict(ours.nodes), dict(ours.networks), dict(ours.servers))


@cache
def _read_builtin() -> Library:
    library = Library()
    for name in ("hardware", "networks", "servers"):
        library.add_file(DATA / f"{name}.toml")
    for path in sorted((DATA / "models").glob("*.toml")):
        table = read_table(path)
        library.models[path.stem] = read_model(path.stem, table)
    return library


def _names(known: Mapping[str, object]) -> str:
    return "one of " + ", ".join(sorted(known))


def _find(what: str, name: str, known: Mapping[str, _Spec]) -> _Spec:
    if name not in known:
        raise ConfigError(
            f"no {what} {name!r:.80} is known; there is {', '.join(sorted(known))}",
            remedy="choose one of these, or describe yours in a TOML file: docs/planning.md",
        )
    return known[name]
