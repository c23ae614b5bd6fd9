"""The verdict counts what was seen, and lets nothing through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from services.chaos.memory import growing, rss_trends
from services.chaos.report import to_dict, to_lines
from services.chaos.verdict import (
    OVERLAPPING,
    Injected,
    Observation,
    judge_requests,
    recoveries,
)

WHOLE = Observation(
    request_id="r-1",
    num_prompt=5,
    expected=(7, 8, 9),
    is_accepted=True,
    submitted_s=10.0,
    seen=((10.1, 5, 7), (10.2, 6, 8), (10.3, 7, 9)),
    stored=((5, 7), (6, 8), (7, 9)),
    num_ends=1,
)


def counts_of(seen: Observation) -> dict[str, int]:
    """The counts that are not 0."""
    verdict = judge_requests([seen])
    names = ("accepted", "completed", "lost", "duplicated", "stuck", "wrong", "failed", "refused")
    return {name: getattr(verdict, name) for name in names if getattr(verdict, name)}


def test_a_whole_answer_is_completed_and_nothing_else() -> None:
    assert counts_of(WHOLE) == {"accepted": 1, "completed": 1}
    assert judge_requests([WHOLE]).is_clean


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(
            replace(WHOLE, num_ends=0, is_on_record=True), {"stuck": 1}, id="no end, on record"
        ),
        pytest.param(
            replace(WHOLE, num_ends=0, is_on_record=False, stored=(), seen=()),
            {"lost": 1},
            id="no end, no record",
        ),
        pytest.param(
            replace(WHOLE, stored=WHOLE.stored[:2], seen=WHOLE.seen[:2]),
            {"lost": 1},
            id="an end without its last token",
        ),
        pytest.param(replace(WHOLE, num_ends=2), {"completed": 1, "duplicated": 1}, id="two ends"),
        pytest.param(
            replace(WHOLE, ends_last=False),
            {"completed": 1, "duplicated": 1},
            id="a token after the end",
        ),
        pytest.param(
            replace(WHOLE, stored=(*WHOLE.stored[:2], (6, 8), (7, 9))),
            {"completed": 1, "duplicated": 1},
            id="a position twice on record",
        ),
        pytest.param(
            replace(WHOLE, seen=(*WHOLE.seen, (10.4, 7, 9))),
            {"completed": 1, "duplicated": 1},
            id="a position seen twice",
        ),
        pytest.param(
            replace(WHOLE, stored=(*WHOLE.stored, (8, 1))),
            {"completed": 1, "duplicated": 1},
            id="a token too many",
        ),
        pytest.param(
            replace(WHOLE, stored=((5, 7), (6, 8), (7, 4)), seen=()),
            {"completed": 1, "wrong": 1},
            id="another token",
        ),
        pytest.param(
            replace(WHOLE, seen=((10.1, 5, 6),)),
            {"completed": 1, "wrong": 1},
            id="the client saw another token than the record has",
        ),
        pytest.param(
            replace(WHOLE, stored=((5, 7), (7, 8), (8, 9)), seen=()),
            {"completed": 1, "wrong": 1},
            id="a hole in the positions",
        ),
        pytest.param(replace(WHOLE, failure="kernel"), {"failed": 1}, id="ended with an error"),
    ],
)
def test_what_is_off_is_counted_and_is_a_problem(
    seen: Observation, expected: dict[str, int]
) -> None:
    assert counts_of(seen) == {"accepted": 1, **expected}
    verdict = judge_requests([seen])
    assert not verdict.is_clean
    assert any("r-1" in named for ids in verdict.named.values() for named in ids)


def test_a_request_that_was_never_accepted_is_refused_and_no_problem() -> None:
    verdict = judge_requests([replace(WHOLE, is_accepted=False, num_ends=0, stored=(), seen=())])

    assert (verdict.accepted, verdict.refused, verdict.problems) == (0, 1, [])


def steady(request_id: str, *, stall_after: int, stall_s: float) -> Observation:
    """Twenty tokens, 0.1 s apart, and one longer wait."""
    at_s, seen = 0.0, []
    for number in range(20):
        at_s += 0.1 + (stall_s if number == stall_after else 0.0)
        seen.append((at_s, 5 + number, 1))
    return replace(WHOLE, request_id=request_id, submitted_s=0.0, seen=tuple(seen))


def test_recovery_is_counted_from_the_fault_to_the_next_token_of_who_was_held_up() -> None:
    held_up = steady("r-1", stall_after=10, stall_s=0.9)  # tokens at 1.0 and 2.0
    untouched = steady("r-2", stall_after=10, stall_s=0.0)

    found = recoveries([held_up, untouched], [Injected("kill worker", 1.25, 1.25)])

    assert found["kill worker"].num_faults == 1
    assert found["kill worker"].num_affected == 1
    assert found["kill worker"].p50_s == pytest.approx(0.75)


def test_recovery_from_a_restart_is_counted_from_the_open_port() -> None:
    held_up = steady("r-1", stall_after=10, stall_s=4.9)  # tokens at 1.0 and 6.0

    found = recoveries([held_up], [Injected("restart broker", 1.5, 5.0)])

    assert found["restart broker"].p99_s == pytest.approx(1.0)


def test_a_wait_with_faults_of_two_kinds_is_nobodys() -> None:
    held_up = steady("r-1", stall_after=10, stall_s=0.9)
    faults = [Injected("kill worker", 1.2, 1.2), Injected("freeze worker", 1.4, 1.4)]

    found = recoveries([held_up], faults)

    assert found[OVERLAPPING].num_affected == 2
    assert found["kill worker"].num_affected == found["freeze worker"].num_affected == 0


def test_a_wait_with_a_restart_counts_for_the_restart() -> None:
    held_up = steady("r-1", stall_after=10, stall_s=4.9)  # tokens at 1.0 and 6.0
    faults = [Injected("restart broker", 1.5, 5.0), Injected("kill worker", 2.0, 2.0)]

    found = recoveries([held_up], faults)

    assert found["restart broker"].p99_s == pytest.approx(1.0)
    assert found["kill worker"].num_affected == 0


def test_a_token_that_was_on_its_way_when_the_broker_died_takes_nothing_from_the_restart() -> None:
    held_up = steady("r-1", stall_after=10, stall_s=4.9)  # tokens at 1.0 and 6.0
    faults = [Injected("restart broker", 0.9, 5.0), Injected("kill worker", 2.0, 2.0)]

    found = recoveries([held_up], faults)

    assert found["restart broker"].p99_s == pytest.approx(1.0)
    assert found["kill worker"].num_affected == 0


def samples(num_s: int, mb_at: Callable[[int], float]) -> list[tuple[float, int]]:
    return [(float(t), round(mb_at(t) * 1e6)) for t in range(num_s)]


def test_memory_that_grows_to_the_end_is_a_problem_and_a_peak_or_warm_up_is_none() -> None:
    leaks = samples(400, lambda t: 50 + t * 0.02)  # 1.2 MB a minute
    breathes = samples(400, lambda t: 50 + (t % 7) + (200 if t == 390 else 0))
    warms_up = samples(400, lambda t: 50 + min(t, 90) * 0.5)

    trends = rss_trends(
        {
            "worker/leaks": leaks,
            "worker/breathes": breathes,
            "scheduler/warms up": warms_up,
            "worker/too short": leaks[:200],
            "worker/far too short": leaks[:50],
            "server/broker": leaks,
        }
    )

    assert {name: trend.is_flat for name, trend in trends.items()} == {
        "worker/leaks": False,
        "worker/breathes": True,
        "scheduler/warms up": True,
        "worker/too short": None,
        "server/broker": None,
    }
    assert trends["worker/leaks"].mb_per_h == pytest.approx(72)
    assert trends["worker/leaks"].first_mb == pytest.approx(50.2)
    (problem,) = growing(trends)
    assert "worker/leaks" in problem


def test_the_report_names_the_counts_and_the_requests_that_are_off() -> None:
    verdict = judge_requests([WHOLE, replace(WHOLE, request_id="r-2", num_ends=0)])

    told = to_dict(verdict)
    text = "\n".join(to_lines(verdict))

    assert (told["accepted"], told["completed"], told["stuck"], told["ok"]) == (2, 1, 1, False)
    assert "r-2" in text
    assert "problem: 1 of 2 accepted requests stuck" in text
