"""How soon it is known who lives, and which layer group a newcomer takes. Pure: knows no store."""

from __future__ import annotations

from collections.abc import Sequence

HEARTBEAT_S = 1.0  # between two words of a worker or scheduler
PRESENCE_TTL_MS = 5_000  # after its last word presence shows it no more
PEERS_REFRESH_S = 0.5  # a worker reads anew who lives
# Longer than workers that start together take to claim, so that one does not take all groups.
ADOPT_AFTER_S = 3.0


def least_covered(coverage: Sequence[int], fits: Sequence[bool] | None = None) -> int | None:
    """The group that a newcomer claims: the least covered that fits it, the lowest of equals.

    `coverage` (G,) counts the live workers of each group, `fits` (G,) says which it has memory for,
    None for all. None when nothing fits. The store's script decides the same, in one step.
    """
    able = [group for group in range(len(coverage)) if fits is None or fits[group]]
    return min(able, key=lambda group: (coverage[group], group), default=None)
