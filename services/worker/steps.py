"""Makes the messages that follow from a computed step. Pure: knows no queue and no store."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from services.worker.batch import Slice
from services.worker.router import with_worker
from services.worker.verdict import HIDDEN, TOKEN_IDS
from shared.messages import Step


def routed(step: Step, *, worker_id: str, group: int, next_worker: str) -> Step:
    """The step, with the worker that computed `group` and the one that is to take it on its route.

    Without a worker id, in the embedded mode, there are no routes.
    """
    if not worker_id:
        return step
    route = with_worker(with_worker(step.route, group, worker_id), step.group, next_worker)
    return replace(step, route=route)


def next_group_step(piece: Slice, hidden: npt.NDArray[np.float32]) -> Step:
    """The step of the next group: the slice's output rows (T, D), sampled if the slice ends it."""
    step = piece.pending.step
    return replace(
        step,
        group=step.group + 1,
        position=piece.position,
        sample=step.sample and piece.completes,
        tensors={HIDDEN: hidden},
    )


def decode_step(step: Step, *, token_id: int, position: int) -> Step:
    """The decode step that feeds the token at `position` back to group 0."""
    return replace(
        step,
        group=0,
        position=position,
        sample=True,
        tensors={TOKEN_IDS: np.array([token_id], dtype=np.int32)},
    )
