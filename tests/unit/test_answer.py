"""Facts about the closing line: it never says what did not happen."""

from services.cli.answer import Answer
from shared.messages import FinishReason


def test_an_answer_without_tokens_has_no_speed_and_no_first_token() -> None:
    line = Answer(finish_reason=FinishReason.ABORT, num_prompt_tokens=5).closing_line()

    assert line == "0 tokens (5 prompt tokens, finish: abort)"


def test_speed_counts_the_tokens_after_the_first() -> None:
    answer = Answer(
        token_ids=[7, 8, 9],
        text="abc",
        finish_reason=FinishReason.LENGTH,
        num_prompt_tokens=1,
        first_token_s=0.5,
        last_token_s=1.5,
    )

    assert answer.closing_line() == (
        "3 tokens, 2.0 tok/s, time to first token 500 ms (1 prompt token, finish: length)"
    )


def test_one_token_has_no_speed() -> None:
    answer = Answer(
        token_ids=[7], text="a", finish_reason=FinishReason.LENGTH, first_token_s=0.5,
        last_token_s=0.5,
    )  # fmt: skip

    assert answer.tokens_per_s is None


def test_a_model_that_says_nothing_is_said_to() -> None:
    answer = Answer(
        token_ids=[2], finish_reason=FinishReason.STOP, first_token_s=0.1, last_token_s=0.1
    )

    assert "without a word" in answer.closing_line()


def test_cached_tokens_of_the_prompt_are_named() -> None:
    line = Answer(
        finish_reason=FinishReason.ABORT, num_prompt_tokens=40, num_cached_tokens=32
    ).closing_line()

    assert line == "0 tokens (40 prompt tokens, 32 of them cached, finish: abort)"
