"""A model as stages: embedding, one layer after the other, head. Two ways to compute them.

`KernelModel` gives the bits that requests get, `FloatStages` what a file's own numbers say in
binary32.

Whoever evaluates runs all windows through a stage before the next one is asked for, so that one
layer of a model is in memory at a time, however large the model is.

T positions of a window, D hidden_size, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.formats.description import TensorView
from shared.kernel.matrix import Float32
from shared.kernel.weights import KernelBackend
from shared.manifest import Manifest
from shared.model.config import ModelConfig
from shared.model.float_model import FloatCache, FloatModel, Observe
from shared.model.layer_group import LayerGroup, ReadShard, SequenceSlice

SLICE_ROWS = 256  # positions that go through a layer at once: what bounds the kernel's scratch

Stage = Callable[[Float32], Float32]
"""(T, D) -> (T, D), positions 0..T-1 of one sequence."""


class StagedModel(Protocol):
    """A model that is computed stage by stage."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def arithmetic(self) -> str:
        """What computes, in a word for reports."""

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        """(T,) -> (T, D)."""

    def layer(self, index: int) -> Stage:
        """One layer, read now and let go of with the stage."""

    def logits(self, hidden: Float32) -> Float32:
        """Rows of the last layer, (n, D) -> (n, V)."""


class KernelModel:
    """A packed model in the arithmetic that answers requests: the same bits."""

    arithmetic = "kernel"

    def __init__(self, manifest: Manifest, read_shard: ReadShard, backend: KernelBackend) -> None:
        self.config = ModelConfig.from_dict(manifest.config)
        self._manifest = manifest
        self._read_shard = read_shard
        self._backend = backend
        self._first = self._group(0)
        self._last = self._group(self.config.num_hidden_layers - 1)

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        return self._first.embed(token_ids)

    def layer(self, index: int) -> Stage:
        group = self._group(index)

        def run(hidden: Float32) -> Float32:
            cache = group.new_cache()
            return np.concatenate(
                [
                    group.forward(rows, [SequenceSlice(cache, start, len(rows))])
                    for start in range(0, len(hidden), SLICE_ROWS)
                    for rows in (hidden[start : start + SLICE_ROWS],)
                ]
            )

        return run

    def logits(self, hidden: Float32) -> Float32:
        return self._last.logits(hidden)

    def _group(self, index: int) -> LayerGroup:
        return LayerGroup.load(
            self.config,
            self._manifest,
            index,
            index + 1,
            self._read_shard,
            first=index == 0,
            last=index == self.config.num_hidden_layers - 1,
            backend=self._backend,
        )


class FloatStages:
    """The numbers of a model file, computed in binary32: its weights alone, nothing else rounded.

    A layer's weights are in memory while its stage is the last that was asked for; embedding and
    head stay. `observe` is `FloatModel`'s.
    """

    arithmetic = "float"

    def __init__(
        self,
        config: ModelConfig,
        views: Mapping[str, TensorView],
        *,
        observe: Observe | None = None,
    ) -> None:
        self.config = config
        self._views = views
        self._held: dict[str, Float32] = {}
        options = {} if observe is None else {"observe": observe}
        self._model = FloatModel(config, self.weights, keep_weights=False, **options)

    def weights(self, name: str) -> Float32:
        """A tensor as the file has it, float32 (rows, cols), read once while it is needed."""
        if name not in self._held:
            view = self._views[name]
            self._held[name] = view.read_float32(0, view.rows)
        return self._held[name]

    def embed(self, token_ids: npt.NDArray[np.int32]) -> Float32:
        return self._model.embed(token_ids)

    def layer(self, index: int) -> Stage:
        own = f"layer.{index}."
        for name in [n for n in self._held if n.startswith("layer.") and not n.startswith(own)]:
            del self._held[name]
        num_layers = self.config.num_hidden_layers
        return lambda hidden: self._model.layer(index, hidden, FloatCache(num_layers))

    def logits(self, hidden: Float32) -> Float32:
        return self._model.head(hidden)

    def head_input(self, hidden: Float32) -> Float32:
        """Rows of the last layer as the head's matrix meets them, (n, D) -> (n, D)."""
        return self._model.head_input(hidden)
