"""Runs a batch through a layer group. Knows no queue and no store.

R rows of the batch, T rows of one sequence, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.batch import Slice
from services.worker.verdict import HIDDEN, TOKEN_IDS
from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup, SequenceSlice

CacheOf = Callable[[Slice], SequenceCache]


def forward_batch(
    layer_group: LayerGroup, slices: Sequence[Slice], cache_of: CacheOf
) -> npt.NDArray[np.float32]:
    """The output rows (R, D) of slices of one group; their KV rows are appended to the caches.

    Raises `KernelError` when a row is not finite; running the same slices again is then safe.
    """
    is_first = slices[0].pending.step.group == 0
    name = TOKEN_IDS if is_first else HIDDEN
    parts = [p.pending.step.tensors[name][p.start : p.start + p.num_rows] for p in slices]
    rows: npt.NDArray[Any] = parts[0] if len(parts) == 1 else np.concatenate(parts)
    hidden = layer_group.embed(rows) if is_first else rows  # (R, D)
    sequences = [SequenceSlice(cache_of(p), p.position, p.num_rows) for p in slices]
    return layer_group.forward(hidden, sequences)
