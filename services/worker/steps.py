"""Makes the messages that follow from a computed step. Pure: knows no queue and no store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from services.worker.batch import Slice
from services.worker.verdict import TOKEN_IDS
from shared.messages import Step
from shared.router import with_worker


def routed(step: Step, *, worker_id: str, group: int, next_worker: str) -> Step:
    """The step, with the worker that computed `group` and the one that is to take it on its route.

    Without a worker id, in the embedded mode, there are no routes.
    """
    if not worker_id:
        return step
    route = with_worker(with_worker(step.route, group, worker_id), step.group, next_worker)
    if route == step.route:
        return step
    return step.then(
        group=step.group,
        position=step.position,
        sample=step.sample,
        tensors=step.tensors,
        draft=step.draft,
        accepted=step.accepted,
        route=route,
    )


def next_group_step(piece: Slice, hidden: Mapping[str, npt.NDArray[Any]]) -> Step:
    """The step of the next group: the slice's T output rows, sampled if the slice ends it.

    `hidden` are the rows as tensors of the layout's wire.
    """
    step = piece.pending.step
    return step.then(
        group=step.group + 1,
        position=piece.position,
        sample=step.sample and piece.completes,
        tensors=hidden,
        draft=piece.draft,
        accepted=piece.accepted,
    )


def following_step(step: Step, *, token_ids: Sequence[int], num_computed: int) -> Step:
    """The decode step after a step that gave `token_ids`, from its end position on, for group 0.

    The rows of the first `num_computed` tokens, drafted and accepted, are in the caches; the others
    are to be computed.
    """
    return step.then(
        group=0,
        position=step.end_position + num_computed,
        sample=True,
        tensors={TOKEN_IDS: np.array(token_ids[num_computed:], dtype=np.int32)},
        draft=(),
        accepted=tuple(token_ids[:num_computed]),
    )


def known_alone(step: Step) -> Step:
    """A step of group 0 that computes again what an earlier draft did: no cache is counted on."""
    if not step.accepted:
        return step
    token_ids = np.array([*step.accepted, *step.tensors[TOKEN_IDS]], dtype=np.int32)
    position = step.position - len(step.accepted)
    return replace(step, position=position, tensors={TOKEN_IDS: token_ids}, accepted=())


def with_draft(step: Step, draft: Sequence[int]) -> Step:
    """A step of group 0 of one token, with guessed ones after it."""
    token_ids = np.array([*step.tensors[TOKEN_IDS], *draft], dtype=np.int32)
    return replace(step, tensors={TOKEN_IDS: token_ids}, draft=tuple(draft))
