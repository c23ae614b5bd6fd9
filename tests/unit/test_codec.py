"""The wire codec: round trips, golden frames of every past version, and hostile bytes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import JSON, MSGPACK, decode, encode, encode_json, request_id_of
from shared.errors import DecodeError, PermanentError, RequestError
from shared.messages import (
    ChatMessage,
    FinishReason,
    Message,
    Reply,
    Request,
    SamplingParams,
    Step,
)
from tests.unit.codec_examples import EXAMPLES, REQUEST, STEP, frame

GOLDEN = Path(__file__).parent.parent / "golden"


def assert_same(got: Message, expected: Message) -> None:
    assert type(got) is type(expected)
    for name in expected.__dataclass_fields__:
        a, b = getattr(got, name), getattr(expected, name)
        if name == "tensors":
            assert list(a) == list(b)
            for key, tensor in b.items():
                assert a[key].dtype == tensor.dtype
                np.testing.assert_array_equal(a[key], tensor)
        else:
            assert a == b
            assert type(a) is type(b)


@pytest.mark.parametrize("name", EXAMPLES)
def test_frames_of_every_version_decode_for_ever(name: str) -> None:
    body = (GOLDEN / f"{name}.msgpack").read_bytes()

    got = decode(body)

    assert_same(got, EXAMPLES[name])


def test_every_golden_frame_is_checked() -> None:
    assert {p.name.removesuffix(".msgpack") for p in GOLDEN.glob("*.msgpack")} == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_survives_the_wire(name: str) -> None:
    assert_same(decode(encode(EXAMPLES[name])), EXAMPLES[name])


def test_a_request_may_be_json_and_leave_out_what_has_a_default() -> None:
    body = json.dumps({"request_id": "r", "prompt": "Hi", "sampling": {"temperature": 1}})

    got = decode(body.encode(), "application/json; charset=utf-8")

    assert got == Request("r", prompt="Hi", sampling=SamplingParams(temperature=1.0))


def test_a_draft_makes_another_kind_which_an_older_worker_refuses() -> None:
    assert b"step.v2" in encode(EXAMPLES["step.v2"])
    assert b"step.v1" in encode(STEP)
    assert b"draft" not in encode(STEP)


def test_what_draws_otherwise_makes_another_kind_too() -> None:
    assert b"step.v3" in encode(EXAMPLES["step.v3"])
    for name in ("min_p", "shaped", "penalty", "logit_bias", "logprobs"):
        assert name.encode() not in encode(STEP)
        assert name.encode() not in encode(EXAMPLES["request.v1"])
        assert name.encode() not in encode(EXAMPLES["reply.v1"]) + encode(EXAMPLES["token.v1"])


def test_a_bias_is_a_map_of_token_ids_in_json_too() -> None:
    sampling = {"logit_bias": {"258": 1.5, "5": -100}, "frequency_penalty": 1, "min_p": 0.5}
    body = json.dumps({"request_id": "r", "prompt": "Hi", "sampling": sampling})

    got = decode(body.encode(), JSON)

    assert isinstance(got, Request)
    assert got.sampling == SamplingParams(
        logit_bias=((5, -100.0), (258, 1.5)), frequency_penalty=1.0, min_p=0.5
    )
    whole = SamplingParams(logit_bias=tuple((i, 1.0) for i in range(300)))
    assert decode(encode(Request("r", prompt="x", sampling=whole))).sampling == whole  # type: ignore[union-attr]


def test_speculation_is_on_unless_a_request_says_no() -> None:
    for value, body in [(True, {}), (True, {"speculation": True}), (False, {"speculation": False})]:
        got = decode(
            json.dumps({"request_id": "r", "prompt": "x", "sampling": body}).encode(), JSON
        )

        assert isinstance(got, Request)
        assert got.sampling.speculation is value


def test_an_unknown_field_is_ignored() -> None:
    assert_same(decode(frame(STEP, added_in_v2={"x": [1]})), STEP)


def test_fields_added_later_take_their_defaults() -> None:
    got = decode(frame(STEP, stop_token_ids=..., deadline_unix_ms=...))

    assert isinstance(got, Step)
    assert (got.stop_token_ids, got.deadline_unix_ms) == ((), 0)


def test_tensors_are_read_only_views_of_the_frame() -> None:
    got = decode(encode(STEP))

    assert isinstance(got, Step)
    assert not got.tensors["hidden"].flags.writeable
    assert not got.tensors["hidden"].flags.owndata


def test_a_big_endian_tensor_is_sent_little_endian() -> None:
    numbers = np.array([[1.5, -2.0]], np.float32)
    step = Step("r", "m", "l", 1, 0, 0, True, 9, {"h": numbers.astype(">f4")}, STEP.sampling)

    got = decode(encode(step))

    assert isinstance(got, Step)
    assert got.tensors["h"].tobytes() == numbers.astype("<f4").tobytes()


def test_a_dtype_without_a_code_is_our_mistake() -> None:
    step = Step("r", "m", "l", 1, 0, 0, True, 9, {"h": np.zeros((1, 2))}, STEP.sampling)

    with pytest.raises(ValueError, match="float64"):
        encode(step)


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 1_048_576),
    ignore_eos=st.booleans(),
    min_p=st.floats(0, 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.dictionaries(st.integers(0, 999_999_999), st.floats(-100, 100), max_size=9).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    logprobs=st.none() | st.integers(0, 20),
)
request_ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", fullmatch=True)
token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50).map(tuple)
texts = st.text(st.characters(codec="utf-8"))
requests = st.one_of(
    st.builds(Request, request_ids, prompt=texts, model=texts, sampling=sampling_params),
    st.builds(
        Request,
        request_ids,
        messages=st.lists(st.builds(ChatMessage, texts, texts), min_size=1).map(tuple),
        deadline_unix_ms=st.integers(0, 2**53 - 1),
    ),
    st.builds(Request, request_ids, token_ids=token_ids),
)
any_texts = st.text(max_size=20)  # lone surrogates too
any_ints = st.integers() | st.integers(-3, 3) | st.sampled_from([2**31, 2**53, 2**64, -(2**63)])
any_request_fields = st.fixed_dictionaries(
    {},
    optional={
        "prompt": any_texts,
        "messages": st.lists(st.builds(ChatMessage, any_texts, any_texts)).map(tuple),
        "token_ids": st.lists(any_ints, max_size=5).map(tuple),
        "model": any_texts,
        "deadline_unix_ms": any_ints,
    },
)
any_sampling_fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(),
        "top_k": any_ints,
        "top_p": st.floats(),
        "seed": st.none() | any_ints,
        "max_tokens": any_ints,
    },
)
replies = st.builds(
    Reply,
    request_ids,
    st.sampled_from(FinishReason),
    texts,
    token_ids,
    st.integers(0, 2**53 - 1),
    texts,
)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    rows = draw(st.integers(1, 4))
    tensors = {}
    for name in draw(st.lists(texts.filter(lambda t: 0 < len(t) <= 64), min_size=1, unique=True)):
        if len(tensors) == 16:
            break
        dtype = draw(st.sampled_from([np.int32, np.float32, np.float16, np.int8, np.uint8]))
        shape = (rows, *draw(st.lists(st.integers(0, 5), max_size=3)))
        numbers = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 100, shape)
        tensors[name] = numbers.astype(dtype)
    small, position = st.integers(0, 2**53 - 1), st.integers(0, 2**31 - 1)
    return Step(
        request_id=draw(request_ids),
        model_id=draw(texts),
        layout_id=draw(texts),
        group=draw(small),
        epoch=draw(small),
        position=draw(position),
        sample=draw(st.booleans()),
        max_position=draw(position),
        tensors=tensors,
        sampling=draw(sampling_params),
        stop_token_ids=draw(token_ids),
        deadline_unix_ms=draw(small),
    )


@settings(deadline=None)  # other processes may hold the cores
@given(st.one_of(steps(), requests, replies))
def test_any_message_survives_the_wire(message: Message) -> None:
    assert_same(decode(encode(message)), message)


@settings(deadline=None)  # other processes may hold the cores
@given(st.binary(max_size=200), st.sampled_from(["application/msgpack", JSON]))
def test_any_bytes_give_a_message_or_one_error(body: bytes, content_type: str) -> None:
    with contextlib.suppress(DecodeError, RequestError):
        assert isinstance(decode(body, content_type), Message)


@given(any_request_fields, any_sampling_fields)
def test_a_request_that_can_be_made_can_be_read(
    fields: dict[str, Any], sampling: dict[str, Any]
) -> None:
    try:
        request = Request("r", sampling=SamplingParams(**sampling), **fields)
    except RequestError:
        return

    assert decode(encode(request)) == request
    assert decode(encode_json(request), JSON) == request


def test_a_request_with_too_many_tokens_or_messages_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="token_ids"):
        Request("r", token_ids=(1,) * (2**20 + 1))
    with pytest.raises(RequestError, match="messages"):
        Request("r", messages=(ChatMessage("user", ""),) * (2**20 + 1))


@pytest.mark.parametrize(
    ("body", "content_type", "request_id"),
    [
        (encode(REQUEST)[:-1], MSGPACK, ""),
        (frame(REQUEST, messages=7), MSGPACK, "req-1"),
        (frame(REQUEST, request_id="-" * 99), MSGPACK, ""),
        (frame(REQUEST, request_id=7), MSGPACK, ""),
        (b'{"request_id": "r", "prompt": 7}', JSON, "r"),
        (b"[]", JSON, ""),
        (b"\xff", JSON, ""),
        (b"", "text/plain", ""),
    ],
)
def test_the_id_of_a_refused_request_is_found_if_it_has_one(
    body: bytes, content_type: str, request_id: str
) -> None:
    with pytest.raises(PermanentError):
        decode(body, content_type)

    assert request_id_of(body, content_type) == request_id
