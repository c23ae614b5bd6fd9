"""Facts about how much prefill a turn may hold: values in, values out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.batch import Pending, Slice, plan_batch
from services.worker.pace import BATCH_STEPS, LATELY_S, Pace
from shared.prefill import MIN_ROWS, TILE_ROWS
from tests.unit.test_worker_batch import make_batch, make_pending

MAX_ROWS = 128


def decode_steps(number: int) -> list[Pending]:
    return [make_pending(f"stream-{i}", position=20) for i in range(number)]


def prompt(rows: int = 512, name: str = "long") -> Pending:
    return make_pending(name, rows=rows)


def turn_of(*items: Pending, prefill_rows: int = 32) -> list[Slice]:
    return plan_batch(
        items, now_s=0.0, max_rows=MAX_ROWS, max_sequences=64, max_prefill_rows=prefill_rows
    )


@pytest.fixture
def pace() -> Pace:
    """A decode turn takes 10 ms and a row of prefill 1 ms."""
    pace = Pace()
    pace.note(turn_of(*decode_steps(8)), 0.010)
    pace.note(turn_of(prompt()), 0.032)
    return pace


def rows(pace: Pace, *items: Pending, now_s: float = 0.0) -> int:
    return pace.prefill_rows(items, now_s=now_s, max_rows=MAX_ROWS)


def test_a_prompt_that_is_alone_has_the_whole_budget(pace: Pace) -> None:
    assert rows(pace, prompt()) == MAX_ROWS


def test_beside_streams_a_slice_takes_as_long_as_a_few_decode_turns(pace: Pace) -> None:
    assert rows(pace, prompt(), *decode_steps(8)) == 24


def test_streams_that_are_at_another_group_are_reckoned_with_for_a_while(pace: Pace) -> None:
    rows(pace, prompt(), *decode_steps(8), now_s=1.0)

    assert rows(pace, prompt(), now_s=1.0 + LATELY_S) == 24
    assert rows(pace, prompt(), now_s=1.01 + LATELY_S) == MAX_ROWS


def test_a_machine_on_which_rows_cost_more_takes_smaller_slices(pace: Pace) -> None:
    for _ in range(30):
        pace.note(turn_of(prompt(), *decode_steps(8)), 0.010 + 32 * 0.0015)

    assert rows(pace, prompt(), *decode_steps(8)) == 16
    assert pace.row_s == pytest.approx(0.0015, rel=0.01)


def test_the_more_prompts_wait_for_each_stream_the_more_of_a_turn_is_theirs(pace: Pace) -> None:
    waiting = [prompt(name=f"prompt-{i}") for i in range(8)]

    assert rows(pace, *waiting, *decode_steps(8)) == 24
    pace.note(turn_of(*decode_steps(2)), 0.010)
    assert rows(pace, *waiting, *decode_steps(2)) == 96


def test_before_anything_was_measured_slices_are_small() -> None:
    assert rows(Pace(), prompt(), *decode_steps(1)) == 2 * MIN_ROWS


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40), st.floats(0, 10)), max_size=20),
    st.integers(1, 256),
)
def test_there_is_always_some_prefill_and_never_more_than_the_budget(
    turns: list[tuple[int, int, float]], max_rows: int
) -> None:
    pace = Pace()
    for num_streams, num_rows, took_s in turns:
        items = decode_steps(num_streams) + ([prompt(num_rows)] if num_rows > 1 else [])
        if items:
            pace.note(turn_of(*items), took_s)

    allowed = pace.prefill_rows([prompt(), *decode_steps(3)], now_s=0.0, max_rows=max_rows)

    assert min(MIN_ROWS, max_rows) <= allowed <= max_rows
    assert allowed == max_rows or allowed % TILE_ROWS == 0


def test_prefill_keeps_to_its_share_of_the_rows() -> None:
    slices = turn_of(prompt(), *decode_steps(8), prefill_rows=24)

    assert [piece.num_rows for piece in slices] == [1] * 8 + [24]


def test_a_rest_that_is_not_worth_a_turn_goes_along() -> None:
    (piece,) = turn_of(prompt(36), prefill_rows=24)
    assert piece.completes
    (piece,) = turn_of(prompt(37), prefill_rows=24)
    assert piece.num_rows == 24


def test_short_prompts_share_the_prefill_rows_in_their_order() -> None:
    slices = turn_of(prompt(10, "a"), prompt(10, "b"), prompt(10, "c"), prefill_rows=16)

    assert [(piece.request_id, piece.num_rows) for piece in slices] == [("a", 10), ("b", 6)]


def test_rows_that_take_no_time_are_as_many_as_the_budget_holds() -> None:
    pace = Pace()
    pace.note(turn_of(*decode_steps(1)), 1.0)
    pace.note(turn_of(prompt()), 1e-311)

    assert rows(pace, prompt(), *decode_steps(1)) == MAX_ROWS


def test_batches_are_bounded_while_somebody_waits_and_for_a_while_after(pace: Pace) -> None:
    (step,) = decode_steps(1)
    of_batch = make_batch(8)

    assert pace.batch_steps(of_batch, now_s=0.0) is None
    assert pace.batch_steps([*of_batch, step], now_s=0.0) == BATCH_STEPS
    assert pace.batch_steps(of_batch, now_s=LATELY_S) == BATCH_STEPS, "it is at another group"
    assert pace.batch_steps(of_batch, now_s=3 * LATELY_S) is None
