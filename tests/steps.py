"""Steps made by hand, and two ordinary requests that must not suffer from them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shared.messages import Step
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, prompt_of

HIDDEN_SIZE = 64
OTHERS = [("a", prompt_of(20), GREEDY), ("b", prompt_of(9, salt=1), SAMPLED)]


def hidden(value: float = 0.1, rows: int = 1, cols: int = HIDDEN_SIZE) -> dict[str, Any]:
    return {"hidden": np.full((rows, cols), value, np.float32)}


def token_ids(*ids: int) -> dict[str, Any]:
    return {"token_ids": np.array(ids, np.int32)}


def start_others(rig: Rig) -> None:
    for request_id, prompt, sampling in OTHERS:
        rig.start(request_id, prompt, sampling)


def finish_others(rig: Rig) -> None:
    rig.run_until_done(*(request_id for request_id, _, _ in OTHERS))
    rig.run_until_quiet()
    assert_answers(rig, OTHERS)


def a_step(rig: Rig, request_id: str, **changes: Any) -> Step:
    step = Step(
        request_id=request_id,
        model_id=rig.layout.model_id,
        layout_id=rig.layout.layout_id,
        group=1,
        epoch=0,
        position=0,
        sample=True,
        max_position=20,
        tensors=hidden(),
        sampling=GREEDY,
    )
    return replace(step, **changes)
