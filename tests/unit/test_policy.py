"""When a request that runs is left alone, driven again or ended."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shared.policy import (
    End,
    Pace,
    Redrive,
    RedriveLimits,
    Running,
    Surroundings,
    Wait,
    decide,
    decide_end,
    patience_s,
    wants_count,
)

LIMITS = RedriveLimits(redrive_after_s=1.0)
FAST = 0.02  # a pace, seconds


def running(**changes: object) -> Running:
    base = Running(
        epoch=3,
        committed_position=20,
        moved_s=100.0,
        started_s=90.0,
        has_moved=True,
        rows=(20, 20, 20),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def around(now_s: float, **changes: object) -> Surroundings:
    base = Surroundings(now_s=now_s, now_unix_ms=1_000_000, num_groups=3)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_nothing_is_done_before_the_patience_is_over() -> None:
    assert decide(running(), around(100.99), FAST, LIMITS) == Wait()


@pytest.mark.parametrize(
    ("rows", "position"),
    [
        ((20, 20, 20), 20),  # intact: the last token alone
        ((21, 21, 20), 20),
        ((21, 19, 20), 19),
        ((20, 20, 0), 0),  # a group lost its rows: the prompt
        ((0, 0, 0), 0),
    ],
)
def test_a_redrive_starts_at_the_shortest_memory(rows: tuple[int, ...], position: int) -> None:
    assert decide(running(rows=rows), around(101.0), FAST, LIMITS) == Redrive(position)


def test_patience_doubles_up_to_its_limit() -> None:
    waits = [patience_s(running(num_redrives=n), FAST, LIMITS) for n in range(8)]

    assert waits == [1, 2, 4, 8, 16, 30, 30, 30]


def test_jitter_only_shortens_the_wait() -> None:
    assert patience_s(running(num_redrives=2, jitter=0.75), FAST, LIMITS) == 3.0


def test_a_slow_crowd_is_given_more_time() -> None:
    assert patience_s(running(), 2.0, LIMITS) == 8.0


def test_a_request_that_no_redrive_helps_ends_and_names_the_group() -> None:
    stuck = running(num_redrives=LIMITS.max_redrives, rows=(21, 20, 20))

    decision = decide(stuck, around(1_000.0), FAST, LIMITS)

    assert isinstance(decision, End)
    assert "position 21" in decision.reason
    assert "layer group 1 of 3" in decision.reason


def test_nothing_is_redriven_while_a_group_has_no_worker() -> None:
    uncovered = around(110.0, uncovered_group=1, uncovered_since_s=100.0)

    assert decide(running(), uncovered, FAST, LIMITS) == Wait()
    assert not wants_count(running(), uncovered, FAST, LIMITS)
    late = decide(running(), replace(uncovered, now_s=115.0), FAST, LIMITS)
    assert isinstance(late, End)
    assert "layer group 1 of 3 has no live worker" in late.reason


def test_a_deadline_ends_a_request_that_moves() -> None:
    overdue = running(deadline_unix_ms=1_000_000)

    assert isinstance(decide_end(overdue, around(100.0), LIMITS), End)
    assert decide_end(running(deadline_unix_ms=1_000_001), around(100.0), LIMITS) == Wait()


def test_a_token_resets_the_patience() -> None:
    tired = running(num_redrives=5, jitter=0.8)

    after = tired.committed(epoch=3, committed_position=21, now_s=200.0)

    assert (after.num_redrives, after.moved_s) == (0, 200.0)
    assert patience_s(after, FAST, LIMITS) == 1.0


def test_another_scheduler_that_drives_it_on_restarts_the_wait() -> None:
    after = running(num_redrives=2).committed(epoch=9, committed_position=20, now_s=150.0)

    assert (after.epoch, after.moved_s, after.num_redrives) == (9, 150.0, 2)


def test_growing_rows_restart_the_wait_and_only_new_ones_its_doubling() -> None:
    lost = running(num_redrives=3, rows=(0, 0, 0), most_rows=60)

    regrown = lost.counted((20, 10, 0), now_s=150.0)
    grown = lost.counted((21, 20, 20), now_s=150.0)

    assert (regrown.moved_s, regrown.num_redrives) == (150.0, 3)
    assert (grown.moved_s, grown.num_redrives) == (150.0, 0)


def test_a_first_count_and_a_loss_are_no_signs_of_life() -> None:
    first = running(rows=None).counted((20, 20, 20), now_s=150.0)
    loss = running().counted((20, 0, 20), now_s=150.0)

    assert first.moved_s == loss.moved_s == 100.0


def test_the_pace_is_the_median_of_what_was_seen() -> None:
    pace = Pace()
    new = replace(running(), has_moved=False)
    for seconds in (1.0, 1.0, 50.0):
        pace.note(new, new.committed(epoch=3, committed_position=21, now_s=100.0 + seconds))

    assert pace.typical_s(new, unknown_s=9.0) == 1.0
    assert pace.typical_s(running(), unknown_s=9.0) == 9.0


events = st.one_of(
    st.tuples(st.just("rows"), st.lists(st.integers(0, 21), min_size=3, max_size=3)),
    st.tuples(st.just("token"), st.none()),
    st.tuples(st.just("time"), st.floats(0.0, 20.0)),
)


@given(st.lists(events, max_size=60))
def test_a_request_is_redriven_a_bounded_number_of_times(script: list[tuple[str, object]]) -> None:
    """Whatever the stores tell, every request ends or moves; nothing is driven too early."""
    known, now_s = running(rows=(0, 0, 0)), 100.0
    num_steps, since_further, sums = 0, 0, {0}
    events = iter(script)
    while True:
        num_steps += 1
        assert num_steps < 5_000, "it goes on for ever"
        kind, value = next(events, ("time", 5.0))
        if kind == "rows":
            rows = tuple(value)  # type: ignore[arg-type]
            if sum(rows) > max(sums):
                since_further = 0
            sums.add(sum(rows))
            known = known.counted(rows, now_s=now_s)
        elif kind == "token":
            since_further = 0
            known = known.committed(
                epoch=known.epoch, committed_position=known.committed_position + 1, now_s=now_s
            )
            known = known.counted((0, 0, 0), now_s=now_s)
        else:
            now_s += value  # type: ignore[operator]
        match decide(known, around(now_s), FAST, LIMITS):
            case Redrive(position=position):
                assert known.rows is not None
                assert position <= min(*known.rows, known.committed_position)
                assert now_s - known.moved_s >= 0.75 * LIMITS.redrive_after_s
                since_further += 1
                assert since_further <= LIMITS.max_redrives
                known = known.redriven(epoch=known.epoch + 1, now_s=now_s, jitter=0.75)
            case End():
                return
