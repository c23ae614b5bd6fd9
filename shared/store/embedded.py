"""A Redis inside this process: for several workers a group in the embedded mode, and for tests.

The only importer of fakeredis. The same store code and the same Lua scripts run on it. Knows no
key and no value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import redis


def embedded_client() -> redis.Redis:
    """A client of a new, empty server that lives as long as the client does."""
    # Here and not above: a cluster's worker has 90 MB for all of its code and never needs this.
    import fakeredis

    server = fakeredis.FakeServer(version=(7,))
    return cast("redis.Redis", fakeredis.FakeRedis(server=server, protocol=2))
