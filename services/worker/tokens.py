"""Draws and commits the tokens of the last layer group. Knows no queue.

B sequences, D hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.stages import COMPUTE, REDIS, Stages
from services.worker.steps import decode_step
from services.worker.verdict import finish_reason
from shared.errors import StoreDamaged
from shared.messages import Step
from shared.model.layer_group import LayerGroup
from shared.model.sampling import sample
from shared.store.ledger import Ledger
from shared.store.ledger_types import AlreadyCommitted, Committed


@dataclass(frozen=True, slots=True)
class GoOn:
    """The token is on record and the request continues with this decode step."""

    step: Step


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing follows: the request ended, or this step's effect is stale or unwanted."""


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """The tokens before this one were lost, so neither may this one be."""

    reason: str


Outcome = GoOn | Ended | OutOfOrder


def sample_and_commit(
    steps: Sequence[Step],
    last_rows: npt.NDArray[np.float32],
    layer_group: LayerGroup,
    ledger: Ledger,
    stages: Stages,
) -> list[Outcome]:
    """Sample one token for each step from its last hidden row (B, D), and commit it.

    Raises `StoreUnavailable`; a repeat after that is harmless, since the first commit of a
    position wins.
    """
    if not steps:
        return []
    logits = layer_group.logits(last_rows)  # (B, V)
    return [_commit(step, row, ledger, stages) for step, row in zip(steps, logits, strict=True)]


def _commit(step: Step, logits: npt.NDArray[np.float32], ledger: Ledger, stages: Stages) -> Outcome:
    position = step.position + step.num_positions
    params = step.sampling
    assert params.seed is not None, "a step always carries its seed"
    token_id = sample(
        logits,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        position=position,
    )
    reason = finish_reason(step, token_id=token_id, position=position)
    stages.lap(COMPUTE)
    try:
        result = ledger.commit(step.request_id, step.epoch, position, token_id, reason)
    except StoreDamaged as error:  # of this request alone: its neighbours go on
        return OutOfOrder(str(error))
    finally:
        stages.lap(REDIS)
    match result:
        case Committed():
            pass
        case AlreadyCommitted(token_id=winner, finish=won):
            # The commit happened, the publish perhaps not: send the same output again.
            token_id, reason = winner, won
        case _:
            # Of a request that ended or moved on, or one whose store lost its last second: from
            # what is left the scheduler drives it on.
            return Ended()
    if reason is not None:
        return Ended()
    return GoOn(decode_step(step, token_id=token_id, position=position))
