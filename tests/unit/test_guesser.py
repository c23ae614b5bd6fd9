"""Facts about guesses from a sequence's own text."""

from __future__ import annotations

import numpy as np
import pytest

from services.worker.draft_policy import MAX_DRAFT, MAX_MATCH
from services.worker.guesser import Guesser, look_up


@pytest.mark.parametrize(
    ("history", "guess", "match"),
    [
        ([], (), 0),
        ([5], (), 0),
        ([5, 6, 7], (), 0),  # nothing stood there before
        ([1, 2, 3, 4, 5, 6, 9, 1, 2, 3], (4, 5, 6, 9, 1), 3),
        ([1, 2, 7, 8, 9, 9, 9, 5, 2, 6, 1, 2], (7, 8, 9, 9, 9), 2),  # longer before later
        ([4, 1, 1, 1, 4, 2, 2, 2, 2, 2, 4], (2, 2, 2, 2, 2), 1),  # of equals the last
        ([3, 7, 7], (7, 7, 7, 7, 7), 1),  # what repeats up to the end goes on so
        ([1, 2, 3, 1, 2, 3, 1], (2, 3, 1, 2, 3), 3),
        ([2, 2], (2, 2, 2, 2, 2), 1),
    ],
)
def test_what_followed_the_longest_known_suffix_is_guessed(
    history: list[int], guess: tuple[int, ...], match: int
) -> None:
    assert look_up(np.array(history, np.int32)) == (guess, match)


def test_a_guess_agrees_with_the_plain_definition() -> None:
    rng = np.random.default_rng(5)
    for _ in range(300):
        history = rng.integers(0, 4, rng.integers(2, 40)).tolist()

        guess, match = look_up(np.array(history, np.int32))

        def ends(length: int, text: list[int] = history) -> list[int]:
            suffix = text[-length:]
            return [e for e in range(length, len(text)) if text[e - length : e] == suffix]

        longest = max((n for n in range(1, MAX_MATCH + 1) if ends(n)), default=0)
        assert match == longest
        if longest:
            after = history[ends(longest)[-1] :]
            assert guess == tuple((after * MAX_DRAFT)[:MAX_DRAFT])


def test_a_text_that_repeats_itself_is_soon_guessed() -> None:
    guesser = Guesser([1, 2, 3, 4] * 3)

    for position in range(12, 30):
        token = [1, 2, 3, 4][position % 4]
        assert guesser.follow(position, [token])
        last = guesser.guess(num_sequences=1, longest=9)

    assert len(last) >= 3
    assert last == tuple([1, 2, 3, 4][p % 4] for p in range(30, 30 + len(last)))
    assert guesser.guess(num_sequences=1, longest=1) == last[:1]
    assert guesser.guess(num_sequences=64, longest=9) == ()


def test_tokens_that_never_came_are_noticed() -> None:
    guesser = Guesser([1, 2, 3])

    assert not guesser.follow(4, [9])
    assert guesser.follow(3, [9])
    assert guesser.follow(3, [9, 8])  # the same step again, and further
    assert guesser.num_tokens == 5


def test_a_long_text_keeps_its_tokens() -> None:
    guesser = Guesser(range(1000, 1050))
    for position in range(50, 2000):
        assert guesser.follow(position, [position + 1000])
    guesser.follow(2000, [1500, 1501, 1502])

    guesser.guess(num_sequences=1, longest=9)
    guesser.follow(2003, [1503])

    assert guesser.acceptance.hits[2] == 1
