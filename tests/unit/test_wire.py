"""What the wires of hidden states keep, what they round, and what they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from services.worker.batch import max_slice_rows
from shared import codec
from shared.broker.base import MAX_BODY_BYTES
from shared.errors import KernelError, ModelError
from shared.messages import MAX_DRAFT_LEN, MAX_ROUTE_LEN, Step
from shared.topology import Wire
from shared.wire import (
    HIDDEN,
    MAX_SCALE,
    SCALE,
    decode_hidden,
    encode_hidden,
    hidden_problem,
    over_a_hop,
    row_bytes,
)
from tests.unit.codec_examples import STEP

Float32 = npt.NDArray[np.float32]
FLOAT_MAX = float(np.finfo(np.float32).max)
COLS = 64
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
HALVES = st.floats(min_value=-65504, max_value=65504, width=32)
SHORT = [Wire.F16, Wire.I8]


def rows(values: st.SearchStrategy[float]) -> st.SearchStrategy[Float32]:
    shapes = st.tuples(st.integers(1, 4), st.just(COLS))
    return hnp.arrays(np.float32, shapes, elements=values)


def received(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors as another process reads them from a frame."""
    step = codec.decode(codec.encode(replace(STEP, tensors=tensors)))
    assert isinstance(step, Step)
    return dict(step.tensors)


@given(rows(HALVES), st.sampled_from(Wire))
def test_what_a_wire_takes_passes_the_door_and_gives_the_same_rows_there(
    hidden: Float32, wire: Wire
) -> None:
    got = received(encode_hidden(hidden, wire))

    assert hidden_problem(got, wire, COLS) == ""
    assert decode_hidden(got, wire).tobytes() == over_a_hop(hidden, wire).tobytes()
    assert sum(tensor.nbytes for tensor in got.values()) == len(hidden) * row_bytes(wire, COLS)


@given(rows(FLOATS))
def test_f32_keeps_every_bit(hidden: Float32) -> None:
    assert over_a_hop(hidden, Wire.F32).tobytes() == hidden.tobytes()


@given(rows(HALVES))
def test_f16_rounds_to_the_nearest_and_ties_to_even(hidden: Float32) -> None:
    got = over_a_hop(hidden, Wire.F16)

    with np.errstate(over="ignore", under="ignore"):
        below = np.nextafter(got.astype(np.float16), np.float16(-np.inf)).astype(np.float64)
        above = np.nextafter(got.astype(np.float16), np.float16(np.inf)).astype(np.float64)
    error = np.abs(hidden.astype(np.float64) - got)
    nearest = np.minimum(np.abs(hidden - below), np.abs(above - hidden))
    assert (error <= nearest).all()
    is_odd = got.astype(np.float16).view(np.uint16) & 1 == 1
    assert not (is_odd & (error == nearest)).any()


@given(rows(FLOATS))
def test_i8_is_the_kernels_quantisation_of_one_term(hidden: Float32) -> None:
    limit = np.float32(127) * MAX_SCALE
    hidden = np.clip(hidden, -limit, limit)

    tensors = encode_hidden(hidden, Wire.I8)

    groups = hidden.reshape(len(hidden), -1, 32)
    amax = np.abs(groups).max(axis=2)
    small = amax < np.float32(2.0**-100)
    assert (tensors[SCALE] == np.where(small, 0, amax / np.float32(127))).all()
    error = np.abs(over_a_hop(hidden, Wire.I8).astype(np.float64) - hidden)
    # Half a step, and what binary32 rounds on the way.
    allowed = np.where(small, amax, amax.astype(np.float64) / 254 * (1 + 1e-4))
    assert (error.reshape(groups.shape).max(axis=2) <= allowed).all()


@pytest.mark.parametrize("wire", SHORT)
def test_a_row_does_not_depend_on_its_neighbours(wire: Wire) -> None:
    hidden = np.random.default_rng(1).normal(0, 30, (7, COLS)).astype(np.float32)

    alone = [over_a_hop(hidden[i : i + 1], wire) for i in range(7)]

    assert np.concatenate(alone).tobytes() == over_a_hop(hidden, wire).tobytes()
    assert not np.array_equal(over_a_hop(hidden, wire), hidden)


@given(rows(st.floats(width=32)), st.sampled_from(SHORT))
def test_what_arrives_is_finite_or_was_refused_by_name(hidden: Float32, wire: Wire) -> None:
    try:
        got = over_a_hop(hidden, wire)
    except KernelError:
        assert not np.isfinite(hidden).all() or np.abs(hidden).max() > 65504
    else:
        assert np.isfinite(got).all()


@pytest.mark.parametrize(
    ("wire", "large", "too_large"),
    [(Wire.F16, 65504, 65504.01), (Wire.I8, 0.99 * FLOAT_MAX, FLOAT_MAX)],
)
def test_a_value_too_large_for_a_wire_is_never_clamped(
    wire: Wire, large: float, too_large: float
) -> None:
    hidden = np.zeros((3, COLS), np.float32)
    hidden[1, 5] = -large

    assert over_a_hop(hidden, wire)[1, 5] == pytest.approx(-large, rel=1e-6)
    hidden[1, 5] = -too_large
    with pytest.raises(KernelError, match=f"{wire} wire .* batch row 1: .*--wire f32"):
        encode_hidden(hidden, wire)


@given(
    hnp.arrays(np.int8, (2, COLS), elements=st.integers(-127, 127)),
    hnp.arrays(np.float32, (2, COLS // 32), elements=st.floats(0, float(MAX_SCALE), width=32)),
)
def test_whatever_i8_passes_the_door_is_finite(q: Any, scale: Any) -> None:
    tensors = {HIDDEN: q, SCALE: scale}

    assert hidden_problem(tensors, Wire.I8, COLS) == ""
    assert np.isfinite(decode_hidden(tensors, Wire.I8)).all()


def test_the_largest_scale_is_the_largest() -> None:
    with np.errstate(over="ignore"):
        assert np.isfinite(np.float32(127) * MAX_SCALE)


def a_frame(wire: Wire, **changes: Any) -> dict[str, Any]:
    return encode_hidden(np.full((2, COLS), 0.5, np.float32), wire) | changes


@pytest.mark.parametrize(
    ("wire", "tensors", "named"),
    [
        *[
            (wire, a_frame(other), f"float32|float16|int8|{SCALE}")
            for wire in Wire
            for other in Wire
            if wire is not other
        ],
        (Wire.I8, {HIDDEN: np.zeros((2, COLS), np.int8)}, "no tensor 'hidden_scale'"),
        (Wire.F16, {SCALE: np.zeros((2, 2), np.float32)}, "no tensor 'hidden'"),
        (Wire.F16, {HIDDEN: np.full((2, COLS), np.inf, np.float16)}, "not finite"),
        (Wire.F16, {HIDDEN: np.full((2, COLS), np.nan, np.float16)}, "not finite"),
        (Wire.F16, {HIDDEN: np.zeros((2, COLS + 1), np.float16)}, r"\(T, 64\).*\(2, 65\)"),
        (Wire.I8, a_frame(Wire.I8, hidden=np.full((2, COLS), -128, np.int8)), "-127..127"),
        (Wire.I8, a_frame(Wire.I8, hidden=np.zeros((2, COLS), np.uint8)), "uint8"),
        *[
            (Wire.I8, a_frame(Wire.I8, hidden_scale=np.full((2, 2), bad, np.float32)), "no scale")
            for bad in (np.nan, np.inf, -1.0, np.nextafter(MAX_SCALE, np.float32(np.inf)))
        ],
        (Wire.I8, a_frame(Wire.I8, hidden_scale=np.zeros((2, 3), np.float32)), SCALE),
        (Wire.I8, a_frame(Wire.I8, hidden_scale=np.zeros((2, 2), np.float16)), SCALE),
    ],
)
def test_other_tensors_than_the_wires_are_refused_by_name(
    wire: Wire, tensors: dict[str, Any], named: str
) -> None:
    assert re.search(named, hidden_problem(received(tensors), wire, COLS))


def test_bytes_of_a_hop() -> None:
    assert {wire: row_bytes(wire, 576) for wire in Wire} == {"f32": 2304, "f16": 1152, "i8": 648}


@pytest.mark.parametrize("wire", Wire)
@pytest.mark.parametrize("hidden_size", [32, 576, 16384, 1 << 20])
def test_the_largest_step_of_any_model_is_a_message_that_a_broker_takes(
    wire: Wire, hidden_size: int
) -> None:
    num_rows = max_slice_rows(row_bytes(wire, hidden_size))
    step = replace(
        STEP,
        model_id="m" * 100,
        layout_id="l" * 100,
        tensors=encode_hidden(np.zeros((num_rows, hidden_size), np.float32), wire),
        route=("w" * 128,) * MAX_ROUTE_LEN,
        stop_token_ids=(2**31 - 1,) * 1024,
        accepted=(2**31 - 1,) * MAX_DRAFT_LEN,
        position=2**31 - 1,
    )

    assert len(codec.encode(step)) < MAX_BODY_BYTES
    assert (num_rows + 1) * row_bytes(wire, hidden_size) > MAX_BODY_BYTES * 0.8


def test_a_model_whose_single_row_no_broker_takes_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="one position takes 9000000 bytes"):
        max_slice_rows(9_000_000)
