"""The tokenizer on a tiny vocabulary, and its refusals. Real ids: tests/model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ModelError, RequestError
from shared.text.document import read_text_document, write_text_document
from shared.text.tokenizer import Tokenizer
from shared.text.vocabulary import TokenType
from tests.gguf_files import CHAT_TEMPLATE, tiny_tokens, tiny_vocabulary

VOCABULARY = tiny_vocabulary()
TOKENIZER = Tokenizer.from_vocabulary(VOCABULARY)


def test_merges_are_applied_in_order_of_rank() -> None:
    ids = TOKENIZER.encode("hello world", parse_special=False)

    assert [VOCABULARY.tokens[i] for i in ids] == ["hello", "Ġworld"]


def test_digits_are_split_one_by_one() -> None:
    ids = TOKENIZER.encode("2024", parse_special=False)

    assert [VOCABULARY.tokens[i] for i in ids] == ["2", "0", "2", "4"]


def test_control_tokens_are_parsed_only_when_asked() -> None:
    text = "<|im_start|>hello"

    assert TOKENIZER.encode(text, parse_special=True)[0] == 1
    as_text = TOKENIZER.encode(text, parse_special=False)
    assert not TOKENIZER.special_token_ids & set(as_text)
    assert TOKENIZER.decode(as_text) == text


def test_control_tokens_are_left_out_of_text_unless_asked() -> None:
    ids = TOKENIZER.encode("<|im_start|>hello<|im_end|>", parse_special=True)

    assert TOKENIZER.decode(ids) == "hello"
    assert TOKENIZER.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"


def test_user_defined_tokens_are_parsed_always_and_shown_always() -> None:
    types = (4, *VOCABULARY.token_types[1:])
    tokenizer = Tokenizer.from_vocabulary(replace(VOCABULARY, token_types=types))

    ids = tokenizer.encode("<|endoftext|>", parse_special=False)

    assert ids == [0]
    assert tokenizer.decode(ids) == "<|endoftext|>"


def test_a_raw_prompt_begins_with_bos_once_if_the_model_wants_it() -> None:
    wants = Tokenizer.from_vocabulary(replace(VOCABULARY, add_bos=True))

    assert wants.encode("hello", parse_special=True, add_bos=True)[0] == 1
    assert wants.encode("<|im_start|>h", parse_special=True, add_bos=True).count(1) == 1
    assert 1 not in wants.encode("hello", parse_special=True)
    assert 1 not in TOKENIZER.encode("hello", parse_special=True, add_bos=True)


@given(st.text())
def test_every_text_survives_the_round_trip(text: str) -> None:
    ids = TOKENIZER.encode(text, parse_special=False)

    assert TOKENIZER.decode(ids) == text


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(RequestError, match="surrogate"):
        TOKENIZER.encode("\ud800", parse_special=True)


@pytest.mark.parametrize("token_id", [-1, len(VOCABULARY.tokens), 2**40])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(RequestError, match=str(token_id)):
        TOKENIZER.decode([token_id])


def test_json_gives_the_same_tokenizer_and_the_same_bytes() -> None:
    text = TOKENIZER.to_json()

    again = Tokenizer.from_json(text)

    assert again.to_json() == text
    assert again.encode("hello world 42<|im_end|>", parse_special=True) == TOKENIZER.encode(
        "hello world 42<|im_end|>", parse_special=True
    )
    assert (again.bos_token_id, again.eos_token_id, again.vocab_size) == (1, 2, len(tiny_tokens()))


def test_the_text_document_carries_tokenizer_and_template() -> None:
    raw = write_text_document(TOKENIZER, CHAT_TEMPLATE)

    tokenizer, template = read_text_document(raw)

    assert template is not None
    assert template.source == CHAT_TEMPLATE
    assert write_text_document(tokenizer, template.source) == raw
    assert read_text_document(write_text_document(TOKENIZER, None))[1] is None


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b"\xff", b'{"chat_template": null}', b"17"])
def test_a_document_that_is_none_is_refused(raw: bytes) -> None:
    with pytest.raises(ModelError):
        read_text_document(raw)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "bert"}, "'bert' is not supported; supported: gpt2, llama"),
        ({"model": "llama"}, "0 scores for 268 tokens"),
        ({"pre": "qwen9"}, "'qwen9' is not supported; supported: a.x-4.0, "),
        ({"merges": ("hello",)}, "'hello' is no pair"),
        ({"merges": ("q zz",)}, "zz"),
        ({"tokens": (*VOCABULARY.tokens[:-1], "a")}, "twice"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_refused_by_name(
    change: dict[str, object], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        Tokenizer.from_vocabulary(replace(VOCABULARY, **change))


def test_token_types_are_those_of_gguf() -> None:
    assert (TokenType.CONTROL, TokenType.USER_DEFINED) == (3, 4)
