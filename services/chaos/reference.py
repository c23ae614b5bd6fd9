"""The undisturbed answer: one process, one layer group, no queue and no store.

What every pipeline must equal, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from shared.kernel.weights import KernelBackend
from shared.manifest import Manifest
from shared.messages import SamplingParams
from shared.model.backend import pick_backend
from shared.model.config import ModelConfig
from shared.model.kv_cache import SequenceCache
from shared.model.layer_group import LayerGroup, ReadShard, SequenceSlice
from shared.model.sampling import sample


@dataclass(slots=True)
class _Answer:
    """One sequence: what it has, and the rows that it computes next."""

    cache: SequenceCache
    sampling: SamplingParams
    rows: list[int]
    position: int = 0
    generated: list[int] = field(default_factory=list)
    is_done: bool = False


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
        """The generated token ids, the stop token included. `sampling.seed` is given."""
        return self.generate_all([(prompt, sampling)])[0]

    def generate_all(
        self, questions: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> list[list[int]]:
        """`generate` of each in one batch, which is faster: a row never depends on the others."""
        answers = [
            _Answer(self._layers.new_cache(), sampling, list(prompt))
            for prompt, sampling in questions
        ]
        while running := [answer for answer in answers if not answer.is_done]:
            self._step(running)
        return [answer.generated for answer in answers]

    def _step(self, answers: Sequence[_Answer]) -> None:
        rows = [token_id for answer in answers for token_id in answer.rows]
        slices = [SequenceSlice(a.cache, a.position, len(a.rows)) for a in answers]
        hidden = self._layers.forward(self._layers.embed(np.array(rows, np.int32)), slices)
        last_rows = np.cumsum([part.num_rows for part in slices]) - 1
        logits = self._layers.logits(np.ascontiguousarray(hidden[last_rows]))  # (n, V)
        for answer, row in zip(answers, logits, strict=True):
            self._draw(answer, row)

    def _draw(self, answer: _Answer, logits: np.ndarray) -> None:
        params = answer.sampling
        assert params.seed is not None, "a reference needs a seed"
        answer.position += len(answer.rows)
        token_id = sample(
            logits,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            position=answer.position,
        )
        answer.generated.append(token_id)
        answer.rows = [token_id]
        stopped = token_id in self.config.eos_token_ids and not params.ignore_eos
        answer.is_done = stopped or len(answer.generated) == params.max_tokens
