"""A step that follows from another says of its request all that the other said."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from tests.unit.codec_examples import STEP

WORK = {"group", "position", "sample", "tensors", "draft", "accepted"}


def test_a_following_step_keeps_what_is_the_requests() -> None:
    step = replace(STEP, is_batch=True, shaped=True)
    names = {field.name for field in fields(step) if field.init} - WORK

    after = step.then(
        group=0,
        position=step.end_position,
        sample=True,
        tensors={"token_ids": np.array([7], dtype=np.int32)},
        draft=(),
        accepted=(),
    )

    assert {name: getattr(after, name) for name in names} == {
        name: getattr(step, name) for name in names
    }
    assert after.is_batch
    assert after.shaped
