"""What is no step, or none of ours, stops at the door of a worker."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shared import codec
from shared.messages import FinishReason, Reply, Request
from tests.rig import Rig
from tests.steps import HIDDEN_SIZE, a_step, finish_others, hidden, start_others, token_ids


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"garbage",
        b"\xff" * 100,
        codec.encode(Request("r", prompt="hello")),
        codec.encode(Reply("r", FinishReason.STOP, "", (), 0)),
    ],
    ids=["empty", "text", "ff", "request", "reply"],
)
@pytest.mark.parametrize("group", [0, 1])
def test_what_is_no_step_is_dead_lettered_and_neighbours_go_on(body: bytes, group: int) -> None:
    rig = Rig(2)
    rig.add_workers()
    start_others(rig)

    rig.publish(rig.queue(group), body)
    finish_others(rig)

    assert rig.num_dead() == 1


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        (0, {"model_id": "other@1"}),
        (1, {"layout_id": "even7"}),
        (1, {"group": 0, "tensors": token_ids(5)}),
        (1, {"group": 7}),
        (0, {"tensors": hidden()}),
        (1, {"tensors": token_ids(5)}),
        (0, {"tensors": token_ids(5, -1)}),
        (0, {"tensors": token_ids(5, 268)}),
        (0, {"tensors": {"token_ids": np.array([5], np.float32)}}),
        (0, {"tensors": {"token_ids": np.array([[5, 6]], np.int32)}}),
        (1, {"tensors": hidden(cols=HIDDEN_SIZE - 1)}),
        (1, {"tensors": {"hidden": np.zeros(HIDDEN_SIZE, np.float32)}}),
        (1, {"tensors": {"hidden": np.zeros((1, HIDDEN_SIZE), np.float16)}}),
        (1, {"tensors": hidden(np.nan)}),
        (1, {"tensors": hidden(np.inf)}),
        (0, {"position": 250, "tensors": token_ids(*range(3, 10))}),
        (1, {"position": 10**12}),
    ],
)
def test_a_step_that_does_not_fit_is_dead_lettered_and_neighbours_go_on(
    group: int, changes: dict[str, Any]
) -> None:
    rig = Rig(2)
    rig.add_workers()
    start_others(rig)
    rig.admit("bad", (5,))
    step = replace(
        a_step(rig, "bad"),
        group=group,
        tensors=token_ids(5) if group == 0 else hidden(),
    )

    rig.publish(rig.queue(group), codec.encode(replace(step, **changes)))
    finish_others(rig)

    assert rig.num_dead() == 1
    assert rig.tokens("bad") == []
