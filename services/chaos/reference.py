"""The undisturbed answer: one process, no queue and no store.

What every pipeline must equal, token by token. How a layout cuts the layers matters only where its
wire rounds what goes from group to group; then the same is done here.
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
from shared.model.logits import LogitsProcessor, make_processors
from shared.model.sampling import sample
from shared.topology import Layout, Wire
from shared.wire import over_a_hop


@dataclass(slots=True)
class _Answer:
    """One sequence: what it has, and the rows that it computes next."""

    caches: list[SequenceCache]  # one a layer group
    sampling: SamplingParams
    rows: list[int]
    position: int = 0
    generated: list[int] = field(default_factory=list)
    is_done: bool = False
    processors: Sequence[LogitsProcessor] = ()


class ReferenceModel:
    """All layers of a model, in one group unless the `layout` has a wire that rounds."""

    def __init__(
        self,
        manifest: Manifest,
        read_shard: ReadShard,
        backend: KernelBackend | None = None,
        *,
        layout: Layout | None = None,
    ) -> None:
        self.config = ModelConfig.from_dict(manifest.config)
        self._wire = layout.wire if layout else Wire.F32
        num_layers = self.config.num_hidden_layers
        bounds = layout.bounds if layout and self._wire is not Wire.F32 else ((0, num_layers),)
        self._groups = [
            LayerGroup.load(
                self.config,
                manifest,
                first,
                end,
                read_shard,
                first=first == 0,
                last=end == num_layers,
                backend=backend or pick_backend(),
            )
            for first, end in bounds
        ]

    def generate(self, prompt: Sequence[int], sampling: SamplingParams) -> list[int]:
        """The generated token ids, the stop token included. `sampling.seed` is given."""
        return self.generate_all([(prompt, sampling)])[0]

    def generate_all(
        self, questions: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> list[list[int]]:
        """`generate` of each in one batch, which is faster: a row never depends on the others."""
        answers = [
            _Answer(
                [group.new_cache() for group in self._groups],
                sampling,
                list(prompt),
                processors=_processors(prompt, sampling),
            )
            for prompt, sampling in questions
        ]
        while running := [answer for answer in answers if not answer.is_done]:
            self._step(running)
        return [answer.generated for answer in answers]

    def _step(self, answers: Sequence[_Answer]) -> None:
        rows = [token_id for answer in answers for token_id in answer.rows]
        hidden = self._groups[0].embed(np.array(rows, np.int32))  # (R, D)
        for number, group in enumerate(self._groups):
            if number:
                hidden = over_a_hop(hidden, self._wire)
            slices = [SequenceSlice(a.caches[number], a.position, len(a.rows)) for a in answers]
            hidden = group.forward(hidden, slices)
        last_rows = np.cumsum([len(answer.rows) for answer in answers]) - 1
        logits = self._groups[-1].logits(np.ascontiguousarray(hidden[last_rows]))  # (n, V)
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
            min_p=params.min_p,
            processors=answer.processors,
        )
        for processor in answer.processors:
            processor.advance(token_id)
        answer.generated.append(token_id)
        answer.rows = [token_id]
        stopped = token_id in self.config.eos_token_ids and not params.ignore_eos
        answer.is_done = stopped or len(answer.generated) == params.max_tokens


def _processors(prompt: Sequence[int], sampling: SamplingParams) -> list[LogitsProcessor]:
    return make_processors(
        prompt=prompt,
        logit_bias=sampling.logit_bias,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
    )
