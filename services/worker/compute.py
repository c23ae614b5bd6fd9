"""Runs a batch through a layer group. Knows no queue and no store.

R rows of the batch, T rows of one sequence, D hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.batch import Slice
from services.worker.verdict import TOKEN_IDS
from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup, SequenceSlice
from shared.topology import Wire
from shared.wire import decode_hidden, tensor_names

CacheOf = Callable[[Slice], SequenceCache]


def forward_batch(
    layer_group: LayerGroup, slices: Sequence[Slice], cache_of: CacheOf, wire: Wire
) -> npt.NDArray[np.float32]:
    """The output rows (R, D) of slices of one group; their KV rows are appended to the caches.

    `wire` is what hidden states come by.
    Raises `KernelError` when a row is not finite; running the same slices again is then safe.
    """
    if slices[0].group == 0:
        hidden = layer_group.embed(_rows(slices, TOKEN_IDS))  # (R, D)
    else:
        hidden = decode_hidden({name: _rows(slices, name) for name in tensor_names(wire)}, wire)
    sequences = [SequenceSlice(cache_of(p), p.position, p.num_rows) for p in slices]
    return layer_group.forward(hidden, sequences)


def _rows(slices: Sequence[Slice], name: str) -> npt.NDArray[Any]:
    """The rows of a tensor that the slices stand for, (R, ...)."""
    parts = [p.pending.step.tensors[name][p.start : p.start + p.num_rows] for p in slices]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
