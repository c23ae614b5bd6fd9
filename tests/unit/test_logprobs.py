"""Log probabilities: their values, their bytes, and how they come to who asked."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler import replies
from shared.errors import DecodeError
from shared.logprobs import TokenLogprobs
from shared.messages import Reply, Request, SamplingParams, Token
from shared.model.logprobs import ln, token_logprobs
from shared.store.ledger_base import token_events
from shared.store.ledger_fields import read_event
from shared.text.logprobs import ShownToken, chat_logprobs, shortest, text_logprobs, token_text
from shared.text.tokenizer import Tokenizer
from tests.gguf_files import tiny_vocabulary
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, prompt_of
from tests.spelling_model import byte_token

F = np.float32
TOKENIZER = Tokenizer.from_vocabulary(tiny_vocabulary())
PROMPT = prompt_of(7) * 4
ASKING = replace(SAMPLED, logprobs=3, max_tokens=20, temperature=0.3, speculation=True)


@given(st.floats(1.0, 1e6) | st.floats(5e-324, 1.7e308))
def test_the_logarithm_is_that_of_libm_but_for_its_last_bits(x: float) -> None:
    assert ln(x) == pytest.approx(math.log(x), rel=4e-16, abs=4e-16)


def test_the_logarithm_is_written_down() -> None:
    # Its bits are a promise: no libm, so the same on every machine.
    assert [ln(x) for x in (1.0, 2.0, 3.0, 49152.0)] == [
        0.0, 0.6931471805599453, 1.0986122886681096, 10.802672816507343,
    ]  # fmt: skip


@given(
    seed=st.integers(0, 1000),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    num_top=st.integers(0, 20),
    size=st.sampled_from([1, 5, 300]),
)
@settings(max_examples=80, deadline=None)
def test_they_are_those_of_the_softmax(seed: int, scale: float, num_top: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(size) * scale).astype(F)
    token = int(rng.integers(size))
    x = logits.astype(np.float64)
    expected = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = sorted(range(size), key=lambda i: (-logits[i], i))[:num_top]

    got = token_logprobs(logits, token, num_top)

    assert got.logprob == pytest.approx(expected[token], rel=1e-6, abs=1e-6)
    assert [i for i, _ in got.top] == order
    assert [p for _, p in got.top] == pytest.approx(expected[order], rel=1e-6, abs=1e-6)


def test_of_equal_ones_the_lower_ids_come_first() -> None:
    got = token_logprobs(F([1, 2, 1, 2, 1]), 4, 4)

    assert [i for i, _ in got.top] == [1, 3, 0, 2]
    assert got.logprob == got.top[-1][1]


@given(
    st.floats(-(2.0**100), 0, width=32),
    st.lists(
        st.tuples(st.integers(0, 2**31 - 1), st.floats(-(2.0**100), 0, width=32)), max_size=20
    ),
)
def test_their_bytes_are_read_as_they_were_written(
    logprob: float, top: list[tuple[int, float]]
) -> None:
    packed = TokenLogprobs.of(logprob, top).packed

    assert len(packed) == 4 + 8 * len(top)
    assert (TokenLogprobs(packed).logprob, TokenLogprobs(packed).top) == (logprob, tuple(top))


@pytest.mark.parametrize("num_bytes", [0, 3, 5, 11, 4 + 8 * 21])
def test_other_bytes_are_a_damaged_event(num_bytes: int) -> None:
    with pytest.raises(DecodeError, match="cannot be read"):
        read_event([b"3-0", [b"t", b"5", b"l", bytes(num_bytes)]])


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("embedded", [False, True], ids=["store", "embedded"])
def test_they_are_the_same_with_and_without_drafts_and_shaped_logits_do_not_show(
    embedded: bool, num_groups: int
) -> None:
    rig = Rig(num_groups, embedded=embedded)
    rig.add_workers()
    rig.add_scheduler()
    plain = replace(ASKING, speculation=False)
    biased = replace(GREEDY, logprobs=3, max_tokens=1, logit_bias=((40, 100.0),))
    asked = [("drafted", PROMPT, ASKING), ("plain", PROMPT, plain), ("biased", PROMPT, biased)]
    for request_id, prompt, sampling in asked:
        rig.submit(Request(request_id, token_ids=prompt, sampling=sampling))
    rig.run_until_quiet()

    assert_answers(rig, asked)
    drafted, plainly, forced = (token_events(rig.ledger, name) for name, _, _ in asked)
    assert [e.logprobs for e in drafted] == [e.logprobs for e in plainly]
    assert all(e.logprobs is not None and len(e.logprobs.top) == 3 for e in drafted)
    assert forced[0].token_id == 40
    assert forced[0].logprobs is not None
    assert drafted[0].logprobs is not None
    assert forced[0].logprobs.top == drafted[0].logprobs.top, "of the model, whatever is drawn"
    assert forced[0].logprobs.logprob < forced[0].logprobs.top[0][1]


def test_who_asks_by_queue_has_them_with_each_token_and_in_the_reply() -> None:
    rig = Rig(2)
    rig.add_workers()
    rig.add_scheduler()
    rig.open_reply_queue("mine")
    request = Request("r", token_ids=PROMPT, sampling=ASKING, stream=True)

    rig.submit(request, reply_to="mine")
    rig.run_until_quiet()

    *tokens, reply = rig.take_all("mine")
    known = [event.logprobs for event in token_events(rig.ledger, "r")]
    assert [token.logprobs for token in tokens if isinstance(token, Token)] == known
    assert isinstance(reply, Reply)
    assert list(reply.logprobs or ()) == known


def test_those_that_no_message_holds_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(1)
    rig.add_workers()
    rig.add_scheduler()
    rig.open_reply_queue("mine")
    monkeypatch.setattr(replies, "MAX_LOGPROBS", 4 * ASKING.max_tokens - 1)

    rig.submit(Request("r", token_ids=PROMPT, sampling=ASKING), reply_to="mine")
    rig.run_until_quiet()

    (reply,) = rig.replies("mine")
    assert reply.logprobs is None
    assert len(reply.token_ids) == ASKING.max_tokens


def test_who_does_not_ask_has_none() -> None:
    rig = Rig(1)
    rig.add_workers()
    rig.start("r", PROMPT, SamplingParams(seed=1, max_tokens=3))
    rig.run_until_done("r")

    assert {event.logprobs for event in token_events(rig.ledger, "r")} == {None}


def shown(byte: int, offset: int, *top: tuple[int, float]) -> ShownToken:
    return ShownToken(byte_token(byte), offset, TokenLogprobs.of(F(-1.1).item(), top))


def test_a_chat_has_them_in_openais_words() -> None:
    tokens = [shown(ord("a"), 0, (byte_token(0xF0), -0.5), (byte_token(ord(" ")), -2.0))]

    assert chat_logprobs(tokens, TOKENIZER) == {
        "content": [
            {
                "token": "a", "logprob": -1.1, "bytes": [97],
                "top_logprobs": [
                    {"token": "bytes:\\xf0", "logprob": -0.5, "bytes": [0xF0]},
                    {"token": " ", "logprob": -2.0, "bytes": [32]},
                ],
            }
        ],
        "refusal": None,
    }  # fmt: skip


def test_a_text_has_the_token_among_the_likeliest_or_beside_them() -> None:
    a, b = byte_token(ord("a")), byte_token(ord("b"))
    tokens = [shown(ord("a"), 0, (b, -0.5)), shown(ord("b"), 1, (b, -1.1), (a, -2.0))]

    assert text_logprobs(tokens, TOKENIZER, num_top=1) == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1.1, -1.1],
        "top_logprobs": [{"b": -0.5, "a": -1.1}, {"b": -1.1, "a": -2.0}],
        "text_offset": [0, 1],
    }
    assert text_logprobs(tokens, TOKENIZER, num_top=0)["top_logprobs"] is None


def test_control_tokens_are_written_with_their_names() -> None:
    end = TOKENIZER.eos_token_id
    assert end is not None
    assert token_text(end, TOKENIZER) == "<|im_end|>"


@given(st.floats(-(2.0**100), 0, width=32))
def test_numbers_are_as_short_as_they_can_be_and_stay_what_they_are(value: float) -> None:
    assert F(shortest(value)) == F(value)
    assert math.isclose(shortest(value), value, rel_tol=1e-6)
