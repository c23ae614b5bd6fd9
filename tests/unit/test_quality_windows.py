"""Windows are cut as llama.cpp cuts them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from services.quality import windows
from services.quality.windows import cut_windows
from shared.errors import ConfigError, RequestError
from shared.text.tokenizer import Tokenizer
from tests.gguf_files import tiny_vocabulary

TEXT = "abcdefgh" * 10  # 80 tokens of one byte each


def tokenizer(*, add_bos: bool = False) -> Tokenizer:
    return Tokenizer.from_vocabulary(replace(tiny_vocabulary(), add_bos=add_bos))


def test_windows_lie_side_by_side_and_the_rest_is_left_out() -> None:
    ids = tokenizer().encode(TEXT, parse_special=False)

    cut = cut_windows(TEXT, tokenizer(), window=32)

    assert cut.num_tokens == len(ids) == 80
    assert cut.inputs.tolist() == [ids[:32], ids[32:64]]


def test_the_second_half_is_scored_but_for_what_the_last_token_predicts() -> None:
    cut = cut_windows(TEXT, tokenizer(), window=32)

    assert cut.first_scored == 16
    assert cut.targets.shape == (2, 32 - 1 - 16)
    assert np.array_equal(cut.targets[0], cut.inputs[0, 17:])


def test_a_model_that_wants_bos_reads_it_in_place_of_each_first_token() -> None:
    plain = tokenizer().encode(TEXT, parse_special=False)

    cut = cut_windows(TEXT, tokenizer(add_bos=True), window=32)

    assert cut.num_tokens == 81  # one at the start of the text, as when it is tokenised
    assert cut.inputs[:, 0].tolist() == [1, 1]
    assert cut.inputs[0, 1:].tolist() == plain[:31]
    assert cut.inputs[1, 1:].tolist() == plain[32:63]


def test_names_of_control_tokens_in_a_text_are_text() -> None:
    cut = cut_windows("<|im_start|>" * 4, tokenizer(), window=16)

    assert not (cut.inputs == 1).any()


def test_a_text_that_fills_no_window_is_refused_with_both_numbers() -> None:
    with pytest.raises(RequestError, match="the text has 80 tokens, fewer than one window of 81"):
        cut_windows(TEXT, tokenizer(), window=81)


def test_a_window_too_short_to_say_anything_is_refused() -> None:
    with pytest.raises(ConfigError, match="--window must be at least 8 tokens, got 7"):
        cut_windows(TEXT, tokenizer(), window=7)


def test_only_the_first_windows_are_taken_when_asked() -> None:
    assert len(cut_windows(TEXT, tokenizer(), window=16, max_windows=3).inputs) == 3
    assert len(cut_windows(TEXT, tokenizer(), window=16).first(2).targets) == 2


@pytest.mark.parametrize("text", [TEXT * 500, "\u00e9\u20ac " * 9000], ids=["ascii", "wide"])
def test_of_a_long_text_as_much_is_read_as_the_windows_take(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "MIN_START_CHARS", 100)
    whole = cut_windows(text, tokenizer(), window=32)

    cut = cut_windows(text, tokenizer(), window=32, max_windows=7)

    assert np.array_equal(cut.inputs, whole.inputs[:7])
    assert np.array_equal(cut.targets, whole.targets[:7])
    assert cut.num_tokens < whole.num_tokens / 2


def test_a_text_that_is_too_long_at_once_is_refused_unless_few_windows_are_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(windows, "MIN_START_CHARS", 100)
    monkeypatch.setattr(windows, "MAX_TEXT_CHARS", 2000)

    with pytest.raises(RequestError, match="has 8000 characters; at most 2000 are tokenised"):
        cut_windows(TEXT * 100, tokenizer(), window=32)
    assert len(cut_windows(TEXT * 100, tokenizer(), window=32, max_windows=2).inputs) == 2
