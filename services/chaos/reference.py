"""The undisturbed answer: one process, one layer group, no queue and no store.

What every pipeline must equal, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.kernel.weights import KernelBackend
from shared.manifest import Manifest
from shared.messages import SamplingParams
from shared.model.backend import pick_backend
from shared.model.config import ModelConfig
from shared.model.layer_group import LayerGroup, ReadShard, SequenceSlice
from shared.model.sampling import sample


class ReferenceModel:
    """All layers of a model in one group."""

    def __init__(
        self, manifest: Manifest, read_shard: ReadShard, backend: KernelBackend | None = None
    ) -> None:
        self.config = ModelConfig.from_dict(manifest.config)
        self._layers = LayerGroup.load(
            self.config,
            manifest,
            0,
            self.config.num_hidden_layers,
            read_shard,
            first=True,
            last=True,
            backend=backend or pick_backend(),
        )

    def generate(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The generated token ids, the stop token included."""
        assert sampling.seed is not None
        cache = self._layers.new_cache()
        generated: list[int] = []
        rows, position = list(prompt), 0
        while True:
            hidden = self._layers.embed(np.array(rows, np.int32))
            hidden = self._layers.forward(hidden, [SequenceSlice(cache, position, len(rows))])
            position += len(rows)
            token_id = sample(
                self._layers.logits(hidden[-1:])[0],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                seed=sampling.seed,
                position=position,
            )
            generated.append(token_id)
            stopped = token_id in self.config.eos_token_ids and not sampling.ignore_eos
            if stopped or len(generated) == sampling.max_tokens:
                return generated
            rows = [token_id]
