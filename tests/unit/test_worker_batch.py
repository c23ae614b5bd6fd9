"""Facts about the choice of the next batch: values in, values out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.worker.batch import BATCH_PREFILL_ROWS, Pending, Slice, plan_batch
from shared.broker.base import Delivery
from shared.messages import SamplingParams, Step


def make_pending(
    request_id: str,
    *,
    group: int = 1,
    position: int = 0,
    rows: int = 1,
    done: int = 0,
    draft: tuple[int, ...] = (),
    is_suspect: bool = False,
) -> Pending:
    step = Step(
        request_id=request_id,
        model_id="m@1",
        layout_id="even3",
        group=group,
        epoch=0,
        position=position,
        sample=True,
        max_position=1000,
        tensors={"hidden": np.zeros((rows + len(draft), 32), np.float32)},
        sampling=SamplingParams(seed=1),
        draft=draft,
    )
    delivery = Delivery("q", b"", False, "application/msgpack", "", "", tag=None)
    return Pending(delivery, step, done=done, is_suspect=is_suspect)


def plan(items: list[Pending], *, now_s: float = 0.0, max_rows: int = 8) -> list[Slice]:
    return plan_batch(items, now_s=now_s, max_rows=max_rows, max_slice_rows=64, max_sequences=4)


def test_decode_steps_go_before_prefill_and_prefill_fills_the_budget() -> None:
    prefill = make_pending("long", rows=20)
    decodes = [make_pending("a", position=5), make_pending("b", position=9)]

    slices = plan([prefill, *decodes])

    assert [(p.pending.step.request_id, p.num_rows) for p in slices] == [
        ("a", 1),
        ("b", 1),
        ("long", 6),
    ]


def test_a_slice_goes_on_where_the_last_one_ended() -> None:
    item = make_pending("long", position=100, rows=20, done=15)

    (piece,) = plan([item])

    assert (piece.start, piece.num_rows, piece.position) == (15, 5, 115)
    assert piece.completes


def test_two_steps_of_a_request_never_share_a_batch_and_the_earlier_rows_go_first() -> None:
    later = make_pending("a", position=8, rows=8)
    earlier = make_pending("a", position=0, rows=8)

    (piece,) = plan([later, earlier], max_rows=100)

    assert piece.pending is earlier


def test_the_group_of_the_oldest_item_is_served() -> None:
    items = [make_pending("a", group=2), make_pending("b", group=1), make_pending("c", group=2)]

    slices = plan(items)

    assert [p.pending.step.request_id for p in slices] == ["a", "c"]


def test_the_first_group_of_the_order_that_has_work_is_served() -> None:
    items = [make_pending("a", group=2), make_pending("b", group=1)]

    slices = plan_batch(
        items, now_s=0.0, max_rows=8, max_slice_rows=64, max_sequences=4, group_order=(0, 1, 2)
    )

    assert [p.pending.step.request_id for p in slices] == ["b"]


def test_parked_items_wait_for_their_time() -> None:
    item = make_pending("a")
    item.retry_at_s = 5.0

    assert plan([item], now_s=4.9) == []
    assert len(plan([item], now_s=5.0)) == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.integers(0, 2),
            st.integers(0, 50),
            st.integers(1, 40),
        ),
        max_size=12,
    ),
    st.integers(1, 64),
)
def test_every_batch_keeps_its_bounds(
    specs: list[tuple[str, int, int, int]], max_rows: int
) -> None:
    items = [
        make_pending(name, group=group, position=position, rows=rows)
        for name, group, position, rows in specs
    ]

    slices = plan_batch(items, now_s=0.0, max_rows=max_rows, max_slice_rows=64, max_sequences=4)

    assert bool(slices) == bool(items)
    assert sum(piece.num_rows for piece in slices) <= max_rows
    assert len(slices) <= 4
    assert len({piece.pending.step.group for piece in slices}) <= 1
    assert len({piece.pending.step.request_id for piece in slices}) == len(slices)
    assert all(piece.num_rows >= 1 for piece in slices)


def test_a_draft_goes_with_the_decode_steps_and_is_cut_where_the_budget_ends() -> None:
    prefill = make_pending("long", rows=20)
    drafted = [
        make_pending("a", position=5, draft=(1, 2, 3, 4)),
        make_pending("b", position=9, draft=(5, 6, 7, 8)),
    ]

    slices = plan([prefill, *drafted])

    assert [(p.request_id, p.num_rows, p.draft, p.completes) for p in slices] == [
        ("a", 5, (1, 2, 3, 4), True),
        ("b", 3, (5, 6), True),
    ]
    alone = slices[1].without_draft()
    assert (alone.num_rows, alone.draft, alone.completes) == (1, (), True)


def test_a_suspect_is_computed_without_its_draft() -> None:
    (piece,) = plan([make_pending("a", position=5, draft=(1, 2), is_suspect=True)])

    assert (piece.num_rows, piece.draft, piece.completes) == (1, (), True)


def test_a_parked_suspect_does_not_keep_other_suspects_waiting() -> None:
    parked = make_pending("a", position=5, is_suspect=True)
    parked.park(now_s=1.0, retry_s=0.005)
    other = make_pending("b", position=3, is_suspect=True)

    (piece,) = plan([parked, other], now_s=2.0)

    assert piece.request_id == "b"


def test_the_sequences_of_a_turn_fit_into_the_cache_together() -> None:
    items = [make_pending(name, position=position) for name, position in
             (("a", 49), ("b", 29), ("c", 19))]  # fmt: skip

    def names(max_positions: int) -> list[str]:
        slices = plan_batch(
            items, now_s=0.0, max_rows=8, max_sequences=4, max_positions={1: max_positions}
        )
        return [piece.request_id for piece in slices]

    assert names(100) == ["a", "b", "c"]
    assert names(99) == ["a", "b"]
    assert names(79) == ["a"]
    assert names(0) == ["a"]  # or it would wait for ever


def make_batch(number: int, **fields: Any) -> list[Pending]:
    items = [make_pending(f"batch-{n}", position=9, **fields) for n in range(number)]
    for item in items:
        item.step = replace(item.step, is_batch=True)
    return items


def test_few_steps_of_batches_run_beside_one_that_somebody_waits_for() -> None:
    asked = make_pending("asked", position=5)

    slices = plan_batch(
        [*make_batch(20), asked], now_s=0.0, max_rows=128, max_sequences=64, max_batch_steps=3
    )

    assert [p.request_id for p in slices] == ["batch-0", "asked", "batch-1", "batch-2"]


def test_prompts_of_batches_are_short_while_somebody_waits() -> None:
    (prompt,) = make_batch(1, rows=500)
    asked = make_pending("asked", rows=40)

    slices = plan_batch(
        [prompt, asked], now_s=0.0, max_rows=128, max_sequences=64, max_batch_steps=3
    )

    assert [(p.request_id, p.num_rows) for p in slices] == [
        ("batch-0", BATCH_PREFILL_ROWS),
        ("asked", 40),
    ]


@given(
    num_batch=st.integers(1, 30),
    num_asked=st.integers(0, 12),
    max_batch_steps=st.integers(1, 5),
    max_sequences=st.integers(1, 10),
    max_rows=st.integers(1, 12),
)
def test_no_step_of_a_batch_waits_for_more_turns_than_there_are_steps_before_it(
    num_batch: int, num_asked: int, max_batch_steps: int, max_sequences: int, max_rows: int
) -> None:
    asked = [make_pending(f"asked-{n}", position=9) for n in range(num_asked)]
    waiting = [*asked, *make_batch(num_batch)]
    for _ in range(num_asked + num_batch):
        oldest = next((item for item in waiting if item.step.is_batch), None)
        slices = plan_batch(
            waiting,
            now_s=0.0,
            max_rows=max_rows,
            max_sequences=max_sequences,
            max_batch_steps=max_batch_steps,
        )
        done = [piece.pending for piece in slices]
        num_done = sum(item.step.is_batch for item in done)
        assert num_done <= max_batch_steps
        if oldest is not None and min(max_sequences, max_rows) > 1:
            assert oldest in done
        if num_asked + max_batch_steps <= min(max_sequences, max_rows):
            num_left = sum(item.step.is_batch for item in waiting)
            assert num_done == min(max_batch_steps, num_left)
        # Whoever is asked for comes again at once, behind all others.
        again = [item for item in done if not item.step.is_batch]
        waiting = [item for item in waiting if item not in done] + again

    assert not any(item.step.is_batch for item in waiting)


def test_steps_of_batches_do_not_keep_others_out_of_a_memory_that_holds_one() -> None:
    waiting = [*make_batch(3), make_pending("asked", position=9)]
    turns = []
    for _ in range(4):
        (piece,) = plan_batch(
            waiting,
            now_s=0.0,
            max_rows=8,
            max_sequences=8,
            max_batch_steps=2,
            max_positions={1: 15},
        )
        turns.append(piece.request_id)
        waiting.remove(piece.pending)
        waiting.append(piece.pending)

    assert turns.count("asked") == 1
