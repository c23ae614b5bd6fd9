"""Facts about how much is guessed: values in, values out."""

from __future__ import annotations

import pytest

from services.worker.draft_policy import (
    MAX_DRAFT,
    MAX_MATCH,
    Acceptance,
    common_prefix,
    draft_length,
    expected_tokens,
    step_cost,
)


def after(match: int, guessed: tuple[int, ...], came: tuple[int, ...], times: int) -> Acceptance:
    acceptance = Acceptance()
    for _ in range(times):
        acceptance = acceptance.noted(match, guessed, came)
    return acceptance


def test_nothing_is_guessed_when_guesses_fail() -> None:
    acceptance = after(3, (1, 2, 3), (9,), times=20)

    assert acceptance.rate(3) < 0.2
    assert draft_length(acceptance.rate(3), num_sequences=1) == 0


def test_a_text_that_repeats_itself_is_guessed_as_far_as_allowed() -> None:
    acceptance = after(3, (1, 2, 3), (1, 2, 3), times=20)

    assert acceptance.rate(3) > 0.9
    assert draft_length(acceptance.rate(3), num_sequences=1) == MAX_DRAFT
    assert draft_length(acceptance.rate(3), num_sequences=1, longest=1) == 1


def test_guesses_that_come_true_again_are_sent_again() -> None:
    acceptance = after(3, (1, 2), (9,), times=20)

    steps = 0
    while draft_length(acceptance.rate(3), num_sequences=1) == 0:
        acceptance = acceptance.noted(3, (1, 2), (1,))  # not sent: one token a step is compared
        steps += 1

    assert 1 <= steps <= 10


def test_the_length_of_the_match_tells_guesses_apart() -> None:
    acceptance = after(1, (1, 2), (9,), times=20)

    assert acceptance.rate(1) < 0.05
    assert acceptance.rate(3) == Acceptance().rate(3)
    assert draft_length(Acceptance().rate(1), num_sequences=1) == 0
    assert draft_length(Acceptance().rate(3), num_sequences=1) > 0


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.95, 1.0])
def test_the_more_sequences_share_a_batch_the_less_is_guessed(rate: float) -> None:
    lengths = [draft_length(rate, num_sequences=n) for n in (1, 2, 4, 8, 16, 64)]

    assert lengths == sorted(lengths, reverse=True)
    assert lengths[2:] == [0, 0, 0, 0]


def test_a_draft_is_sent_only_where_it_gains_time() -> None:
    for percent in range(0, 101, 5):
        rate = percent / 100
        k = draft_length(rate, num_sequences=1)
        assert k == 0 or expected_tokens(rate, k) > step_cost(1 + k)


@pytest.mark.parametrize(
    ("guessed", "came", "hits", "tries"),
    [
        ((1, 2, 3), (1, 2, 3, 4), 3, 3),  # all right, and one token more
        ((1, 2, 3), (1, 9), 1, 2),
        ((1, 2, 3), (9,), 0, 1),
        ((1, 2, 3), (1,), 1, 1),  # the rest was not tried
    ],
)
def test_what_came_is_counted_up_to_the_first_miss(
    guessed: tuple[int, ...], came: tuple[int, ...], hits: int, tries: int
) -> None:
    acceptance = Acceptance().noted(2, guessed, came)

    assert (acceptance.hits[1], acceptance.tries[1]) == (hits, tries)
    assert len(acceptance.hits) == MAX_MATCH


def test_a_common_prefix_ends_with_the_shorter() -> None:
    assert common_prefix((1, 2, 3), (1, 2)) == 2
    assert common_prefix((), (1,)) == 0
    assert common_prefix((1, 2, 3), (1, 5, 3)) == 1
