"""Decoding with nothing but the kernel and the sampler: what a pipeline is held against.

Knows no queue, no ledger and no worker.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup, SequenceSlice
from shared.model.sampling import sample

SLICE_ROWS = 128


class KernelAlone:
    """Greedy answers to one prompt by a group that has all layers, again and again."""

    def __init__(self, group: LayerGroup, prompt: Sequence[int]) -> None:
        """Computes the prompt, but for its last token."""
        self._group = group
        self._last = prompt[-1]
        self._start = len(prompt) - 1
        self._cache = _filled(group, prompt[:-1])

    def decode(self, num_tokens: int) -> tuple[list[int], float]:
        """That many tokens, and the seconds a token after the first."""
        self._cache.truncate(self._start)
        token_ids = [self._next(self._last)]
        started_s = time.perf_counter()
        while len(token_ids) < num_tokens:
            token_ids.append(self._next(token_ids[-1]))
        return token_ids, (time.perf_counter() - started_s) / (num_tokens - 1)

    def _next(self, token_id: int) -> int:
        position = self._cache.num_positions
        hidden = self._group.embed(np.array([token_id], np.int32))
        hidden = self._group.forward(hidden, [SequenceSlice(self._cache, position, 1)])
        logits = self._group.head(hidden)
        return sample(
            logits.values[0],
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            seed=0,
            position=position + 1,
            largest=logits.largest[0],
        )


def _filled(group: LayerGroup, prompt: Sequence[int]) -> SequenceCache:
    cache = group.new_cache()
    for start in range(0, len(prompt), SLICE_ROWS):
        token_ids = np.array(prompt[start : start + SLICE_ROWS], np.int32)
        group.forward(group.embed(token_ids), [SequenceSlice(cache, start, len(token_ids))])
    return cache
