"""How many KV rows the workers' memory holds. Knows no request.

A worker reads rows again from the store if it must, but a cluster whose caches do not hold what
runs does little else; and a worker computes no sequence that is larger than its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.scheduler.admission import ServedModel, kv_bytes_per_position
from shared.store.presence_types import WorkerInfo, WorkerState


class CapacityWatch:
    """Asks `peers()` once in `every_s`. Bytes are those of rows of all layers; None: not known.

    `all_bytes` is for all requests together, `largest_bytes` for one.
    """

    def __init__(
        self, peers: Callable[[], Sequence[WorkerInfo]], model: ServedModel, *, every_s: float
    ) -> None:
        self.all_bytes: int | None = None
        self.largest_bytes: int | None = None
        self._peers = peers
        self._model = model
        self._every_s = every_s
        self._next_s = 0.0

    def look(self, now_s: float) -> None:
        """Bring both up to date. Raises `StoreUnavailable`."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        layout, config = self._model.layout, self._model.config
        layer_bytes = config.kv_row_bytes_per_layer
        num_layers = [layout.num_layers(group) for group in range(layout.num_groups)]
        per_position = kv_bytes_per_position(config)
        positions: list[list[int]] = [[] for _ in num_layers]
        for peer in self._peers():
            if peer.state is not WorkerState.SERVING:
                continue
            if not peer.kv_cache_bytes:  # it does not say
                self.all_bytes = self.largest_bytes = None
                return
            row_bytes = layer_bytes * sum(num_layers[group] for group in peer.groups)
            for group in peer.groups:
                positions[group].append(peer.kv_cache_bytes // row_bytes)
        if not all(positions):  # nothing runs, and who comes may have as much as who was here
            return
        self.all_bytes = per_position * min(map(sum, positions))
        self.largest_bytes = per_position * min(map(max, positions))
