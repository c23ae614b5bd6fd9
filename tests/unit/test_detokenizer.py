"""Text in pieces: nothing split, nothing lost, nothing invented."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import RequestError
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer
from tests.gguf_files import tiny_vocabulary

VOCABULARY = tiny_vocabulary()
TOKENIZER = Tokenizer.from_vocabulary(VOCABULARY)
IDS = st.lists(st.integers(0, len(VOCABULARY.tokens) - 1), max_size=60)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.feed([i]) for i in ids), detokenizer.finish()]


@given(IDS)
def test_pieces_join_to_the_decoded_text(ids: list[int]) -> None:
    assert "".join(pieces_of(TOKENIZER, ids)) == TOKENIZER.decode(ids)


@given(st.text(alphabet=st.characters(exclude_characters="�", exclude_categories=["Cs"])))
def test_text_never_shows_a_replacement_character(text: str) -> None:
    ids = TOKENIZER.encode(text, parse_special=False)

    pieces = pieces_of(TOKENIZER, ids)

    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_a_character_comes_out_with_its_last_byte() -> None:
    ids = TOKENIZER.encode("🐇", parse_special=False)

    assert pieces_of(TOKENIZER, ids) == ["", "", "", "🐇", ""]


def test_a_character_left_open_ends_as_one_replacement() -> None:
    ids = TOKENIZER.encode("🐇", parse_special=False)[:3]

    assert pieces_of(TOKENIZER, ids) == ["", "", "", "�"]


def test_control_tokens_give_no_text() -> None:
    detokenizer = Detokenizer(TOKENIZER)

    assert detokenizer.feed([1]) == ""
    assert Detokenizer(TOKENIZER, skip_special=False).feed([1]) == "<|im_start|>"


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="vocabulary"):
        Detokenizer(TOKENIZER).feed([10**6])
