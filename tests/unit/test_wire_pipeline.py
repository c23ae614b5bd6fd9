"""A pipeline whose layout declares a shorter wire: the same tokens whatever happens, within it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from services.chaos.reference import ReferenceModel
from services.worker.limits import WorkerLimits
from shared import codec
from shared.dead_letters import DeadLetter
from shared.late_frame import Frame
from shared.messages import Step
from shared.store.prefix_pages import page_digests
from shared.topology import DEAD_QUEUE, Wire, even_layout, group_queues
from shared.wire import encode_hidden, row_bytes
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, expected_tokens, prompt_of
from tests.steps import HIDDEN_SIZE, a_step, finish_others, start_others
from tests.tiny_model import TinyModel, tiny_model

SHORT = [Wire.F16, Wire.I8]
ASKED = [
    ("a", prompt_of(40), replace(GREEDY, max_tokens=24)),
    ("b", prompt_of(23, salt=2), replace(SAMPLED, max_tokens=24)),
    ("c", prompt_of(3, salt=5) * 9, replace(GREEDY, max_tokens=24, speculation=True)),
]


@pytest.mark.parametrize("wire", SHORT)
@pytest.mark.parametrize("num_groups", [2, 4])
@pytest.mark.parametrize(("per_group", "max_rows"), [(1, 128), (2, 7)])
def test_tokens_are_the_references_however_rows_are_cut_and_batched(
    wire: Wire, num_groups: int, per_group: int, max_rows: int
) -> None:
    rig = Rig(num_groups, wire=wire, limits=WorkerLimits(max_batch_rows=max_rows))
    rig.add_workers(per_group)
    for request in ASKED:
        rig.start(*request)

    rig.run_until_done("a", "b", "c")

    assert_answers(rig, ASKED)


@pytest.mark.parametrize("wire", SHORT)
def test_a_killed_worker_changes_no_token(wire: Wire) -> None:
    rig = Rig(3, wire=wire, limits=WorkerLimits(max_batch_rows=16))
    workers = rig.add_workers(2)
    for request in ASKED:
        rig.start(*request)

    for victim in workers[::2]:
        before = len(rig.tokens("a"))
        rig.run_until(lambda before=before: len(rig.tokens("a")) > before + 1)
        rig.kill(victim)
    rig.run_until_done("a", "b", "c")

    assert_answers(rig, ASKED)


@pytest.mark.parametrize("wire", SHORT)
def test_the_cut_counts_where_a_wire_rounds_and_nowhere_else(wire: Wire) -> None:
    def tokens(num_groups: int, wire: Wire) -> list[list[int]]:
        return [
            expected_tokens(tuple(prompt), sampling, num_groups=num_groups, wire=wire)
            for _, prompt, sampling in ASKED
        ]

    plain = tokens(1, Wire.F32)

    assert tokens(4, Wire.F32) == tokens(1, wire) == plain
    # Each of 4 layers of a random model feels the rounding: a test of equal tokens sees the wire.
    assert wire is Wire.F16 or tokens(4, wire) != plain


@pytest.mark.parametrize("wire", Wire)
def test_frames_carry_what_the_layout_declares(wire: Wire) -> None:
    rig = Rig(2, wire=wire)
    rig.add_worker(0)
    rig.start("a", prompt_of(20))

    rig.run_until(lambda: rig.num_ready(rig.queue(1)) == 1)
    (step,) = rig.take_all(rig.queue(1))

    assert {name: tensor.dtype.name for name, tensor in step.tensors.items()} == {
        Wire.F32: {"hidden": "float32"},
        Wire.F16: {"hidden": "float16"},
        Wire.I8: {"hidden": "int8", "hidden_scale": "float32"},
    }[wire]
    assert sum(t.nbytes for t in step.tensors.values()) == 20 * row_bytes(wire, HIDDEN_SIZE)


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("other", Wire)
def test_a_frame_of_another_wire_stops_at_the_door(wire: Wire, other: Wire) -> None:
    rig = Rig(2, wire=wire)
    rig.add_workers()
    start_others(rig)
    rig.admit("odd", (5,), replace(GREEDY, max_tokens=1))
    tensors = encode_hidden(np.full((1, HIDDEN_SIZE), 0.1, np.float32), other)

    rig.publish(rig.queue(1), codec.encode(a_step(rig, "odd", tensors=tensors)))
    finish_others(rig)

    letters = [DeadLetter.of(delivery) for delivery in rig.take_deliveries(DEAD_QUEUE)]
    if wire is other:
        assert not letters
        assert len(rig.tokens("odd")) == 1
    else:
        (letter,) = letters
        assert f"the {wire} wire" in letter.reason
        assert rig.tokens("odd") == []


class Loud:
    """A layer group in front of another: of one request the rows that it gives are very large."""

    def __init__(self, inner: Any, num_rows: int) -> None:
        self._inner = inner
        self._num_rows = num_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, hidden: Any, sequences: Any) -> Any:
        out = self._inner.forward(hidden, sequences)
        start = 0
        for part in sequences:
            if part.num_rows == self._num_rows:
                out[start + part.num_rows - 1, 3] = 7e4
            start += part.num_rows
        return out


def test_what_f16_cannot_hold_ends_its_request_by_name_and_no_other() -> None:
    rig = Rig(2, wire=Wire.F16)
    rig.add_worker(0, layer_groups={0: Loud(rig.layer_group(0), 11)})
    rig.add_worker(1)

    start_others(rig)
    rig.start("loud", prompt_of(11))
    finish_others(rig)

    (final,) = rig.final_events("loud")
    assert final.finish_reason == "error"
    assert "70000 is over 65504; load the model with --wire f32" in final.error


def test_wires_share_no_queue_and_no_page() -> None:
    layouts = [even_layout("m@1", 4, 2, wire=wire) for wire in Wire]

    assert len({spec.name for layout in layouts for spec in group_queues(layout)}) == 6
    assert len({page_digests(layout, range(16))[0] for layout in layouts}) == 3
    assert len({layout.layout_id for layout in layouts}) == 3  # which keys of KV pages hold


@cache
def wide_model() -> TinyModel:
    """A row of it takes 64 KiB, so that 128 of them are 8 MiB."""
    return tiny_model(
        local_store_bytes=1 << 20,
        vocab_size=268,
        hidden_size=16384,
        intermediate_size=32,
        num_hidden_layers=2,
    )


@pytest.mark.parametrize("wire", Wire)
def test_the_widest_model_sends_no_message_that_is_too_large(wire: Wire) -> None:
    model = wide_model()
    rig = Rig(2, wire=wire, model=model)
    rig.add_worker(0)
    prompt, sampling = prompt_of(140), replace(GREEDY, max_tokens=2)

    rig.start("a", prompt, sampling)
    rig.run_until(lambda: rig.num_steps() == rig.num_ready(rig.queue(1)))
    sizes = [len(delivery.body) for delivery in rig.take_deliveries(rig.queue(1))]

    assert max(sizes) < 8 << 20
    assert max(sizes) > 7 << 20 or wire is not Wire.F32
    assert sum(sizes) > 140 * row_bytes(wire, 16384)


@pytest.mark.parametrize("wire", Wire)
def test_a_step_is_encoded_in_one_process_only_if_somebody_looks(wire: Wire) -> None:
    rig = Rig(2, wire=wire)
    rig.add_worker(0)

    rig.start("a", prompt_of(5), GREEDY)
    rig.run_until(lambda: rig.num_ready(rig.queue(1)) == 1)
    (delivery,) = rig.take_deliveries(rig.queue(1))

    assert isinstance(delivery.content, Frame)
    step = delivery.content.step()
    assert step is not None
    looked_at = codec.decode(delivery.body)
    assert isinstance(looked_at, Step)
    assert looked_at.tensors.keys() == step.tensors.keys()
    for name, tensor in step.tensors.items():
        assert looked_at.tensors[name].tobytes() == tensor.tobytes()
    assert replace(looked_at, tensors=step.tensors) == step


def test_the_widest_model_answers() -> None:
    model = wide_model()
    rig = Rig(2, model=model)
    rig.add_workers()
    prompt, sampling = prompt_of(140), replace(GREEDY, max_tokens=2)

    rig.start("a", prompt, sampling)
    rig.run_until_done("a")

    reference = ReferenceModel(model.manifest, model.read_shard)
    assert rig.tokens("a") == reference.generate(prompt, sampling)
