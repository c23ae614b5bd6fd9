"""Decides what becomes of a step, from values alone. Knows no queue, store or kernel."""

from __future__ import annotations

from collections.abc import Container
from typing import Final

import numpy as np

from shared.messages import FinishReason, Step
from shared.model.config import ModelConfig
from shared.topology import Layout
from shared.wire import hidden_problem

TOKEN_IDS: Final = "token_ids"


def step_problem(step: Step, *, layout: Layout, config: ModelConfig, groups: Container[int]) -> str:
    """Why a worker that serves `groups` of `layout` cannot compute this step; "" if it can."""
    if (step.model_id, step.layout_id) != (layout.model_id, layout.layout_id):
        return (
            f"step is for model {step.model_id} layout {step.layout_id}, this worker serves "
            f"{layout.model_id} layout {layout.layout_id}"
        )
    if step.group not in groups:
        return f"step is for group {step.group}, which is not served here"
    end = step.position + step.num_positions
    if end > config.max_position_embeddings:
        return (
            f"positions {step.position}..{end - 1} exceed the model's "
            f"{config.max_position_embeddings}"
        )
    if step.group == 0:
        return _tokens_problem(step, config)
    return hidden_problem(step.tensors, layout.wire, config.hidden_size)


def _tokens_problem(step: Step, config: ModelConfig) -> str:
    tensor = step.tensors.get(TOKEN_IDS)
    if tensor is None:
        return f"step for group 0 carries no tensor {TOKEN_IDS!r}"
    if tensor.ndim != 1 or tensor.dtype != np.int32:
        return f"token_ids must be int32 (T,), got {tensor.dtype} {tensor.shape}"
    token_ids = tensor.tolist()  # mostly one: Python is done before a NumPy call has begun
    if min(token_ids) < 0 or max(token_ids) >= config.vocab_size:
        return f"token_ids must be in 0..{config.vocab_size - 1}"
    if step.draft and tuple(token_ids[1:]) != step.draft:
        return "the draft is not what token_ids ends with"
    return ""


def finish_reason(step: Step, *, token_id: int, position: int) -> FinishReason | None:
    """Why the request ends with this token at this position, or None if it goes on."""
    if token_id in step.stop_token_ids and not step.sampling.ignore_eos:
        return FinishReason.STOP
    if position >= step.max_position:
        return FinishReason.LENGTH
    return None
