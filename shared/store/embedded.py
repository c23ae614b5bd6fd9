"""A Redis inside this process, for embedded workers that share KV rows, and for tests.

The only importer of fakeredis. The same store code and the same Lua scripts run on it. Knows no key
and no value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import redis

_COLLECT = "collectgarbage()"
_COLLECT_EVERY = 256


def embedded_client() -> redis.Redis:
    """A client of a new, empty server that lives as long as the client does."""
    # Here and not above: a cluster's worker has 90 MB for all of its code and never needs this.
    import fakeredis

    server = fakeredis.FakeServer(version=(7,))
    client = cast("redis.Redis", fakeredis.FakeRedis(server=server, protocol=2))
    client.eval("return 1", 0)  # makes the server's Lua runtime
    runtime = getattr(server, "_lua_runtime", None)
    if runtime is not None:  # else this fakeredis keeps it elsewhere: slower, and the same
        setattr(server, "_lua_runtime", _CompiledScripts(runtime))  # noqa: B010  (untyped there)
    return client


class _CompiledScripts:
    """A Lua runtime that compiles each script once and collects garbage now and then.

    fakeredis does both at every call, which was a quarter of a token's commit (0.29 ms, now 0.21).
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._functions: dict[str | bytes, Callable[[], Any]] = {}
        self._num_collects = 0

    def execute(self, script: str | bytes) -> Any:
        if script == _COLLECT:
            self._num_collects += 1
            if self._num_collects % _COLLECT_EVERY:
                return None
        function = self._functions.get(script)
        if function is None:
            function = self._functions[script] = self._runtime.compile(script)
        return function()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)
