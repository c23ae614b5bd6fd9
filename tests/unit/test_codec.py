"""The wire codec: round trips, golden frames of every past version, and hostile bytes."""

from __future__ import annotations

import contextlib
import json
import math
import random
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import JSON, MAX_FRAME_BYTES, decode, encode
from shared.errors import DecodeError, RequestError
from shared.messages import (
    ChatMessage,
    FinishReason,
    Message,
    Reply,
    Request,
    SamplingParams,
    Step,
)

GOLDEN = Path(__file__).parent.parent / "golden"

STEP = Step(
    request_id="req-1",
    model_id="tiny@0123abcd",
    layout_id="even3",
    group=1,
    epoch=2,
    position=40,
    sample=True,
    max_position=296,
    tensors={"hidden": np.arange(32, dtype=np.float32).reshape(2, 16) / 8},
    sampling=SamplingParams(0.8, 40, 0.95, 2**64 - 1, 256, True),
    stop_token_ids=(0, 2),
    deadline_unix_ms=1_790_000_000_000,
)
TOKENS_STEP = Step(
    request_id="req-2",
    model_id="tiny@0123abcd",
    layout_id="even3",
    group=0,
    epoch=0,
    position=0,
    sample=False,
    max_position=10,
    tensors={"token_ids": np.array([1, 5, 2**31 - 1], np.int32)},
    sampling=SamplingParams(seed=7),
)
REQUEST = Request(
    "req-1",
    messages=(ChatMessage("system", "Be brief."), ChatMessage("user", "Größe?")),
    model="tiny",
    sampling=SamplingParams(0.7, 5, 0.9, 11, 64, False),
    deadline_unix_ms=1_790_000_000_000,
)
REPLY = Reply("req-1", FinishReason.LENGTH, "about 12 cm", (5, 6, 7), 12)
EXAMPLES: dict[str, Message] = {
    "step.v1": STEP,
    "step.v1.tokens": TOKENS_STEP,
    "request.v1": REQUEST,
    "request.v1.prompt": Request("req-2", prompt="Hello"),
    "request.v1.token_ids": Request("req-3", token_ids=(1, 2, 3)),
    "reply.v1": REPLY,
    "reply.v1.error": Reply("req-4", FinishReason.ERROR, "", (), 3, "deadline passed"),
}


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


def frame(message: Message, **changes: Any) -> bytes:
    """The frame of a message with fields changed; `...` takes a field away."""
    fields = msgpack.unpackb(encode(message)) | changes
    return bytes(msgpack.packb({k: v for k, v in fields.items() if v is not ...}))


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


def tensor(**changes: Any) -> dict[str, Any]:
    return {"h": {"dtype": "f32", "shape": [1, 2], "data": bytes(8)} | changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "step.v2"}, "kind must be one of"),
        ({"kind": ["step.v1"]}, "kind must be one of"),
        ({"group": True}, "group must be an integer, got bool"),
        ({"group": 1.0}, "group must be an integer, got float"),
        ({"group": -1}, "group must be in"),
        ({"position": 2**53}, "position must be in"),
        ({"model_id": b"m"}, "model_id must be text"),
        ({"sample": 1}, "sample must be true or false"),
        ({"request_id": "a b"}, "request_id is malformed"),
        ({"group": ...}, "group is missing"),
        ({"tensors": {}}, "carries no tensor"),
        ({"tensors": [1]}, "tensors must be a map"),
        ({"tensors": tensor(dtype="float32")}, "one of i32, f32"),
        ({"tensors": tensor(dtype="(2,)f4")}, "one of i32, f32"),
        ({"tensors": tensor(dtype=["f32"])}, "one of i32, f32"),
        ({"tensors": tensor(shape=[1, 3])}, "must be 12 bytes"),
        ({"tensors": tensor(shape=[2**22, 2**22])}, "must be 70368744177664 bytes"),
        ({"tensors": tensor(shape=[2**40])}, "sizes in 0"),
        ({"tensors": tensor(shape=[-1, -2])}, "sizes in 0"),
        ({"tensors": tensor(shape=[True, 2])}, "sizes in 0"),
        ({"tensors": tensor(shape=[1, 1, 1, 1, 2])}, "1-4 sizes"),
        ({"tensors": tensor(shape=[])}, "1-4 sizes"),
        ({"tensors": tensor(data="text")}, "must be bytes"),
        ({"tensors": tensor(shape=[0, 2], data=b"")}, "are empty"),
        ({"tensors": {str(i): tensor()["h"] for i in range(17)}}, "at most 16"),
        ({"sampling": {}}, "seed must be given"),
        ({"sampling": {"seed": 1, "temperature": math.nan}}, "temperature must be in"),
        ({"sampling": {"seed": 1, "top_k": [1]}}, "where a number belongs"),
        ({"sampling": {"seed": True}}, "seed must be an integer"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\] must be in"),
    ],
)
def test_a_wrong_step_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decode(frame(STEP, **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"temperature": math.nan}}, "temperature must be in 0..100, got nan"),
        ({"sampling": {"top_p": 0}}, "top_p must be in"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens must be in"),
        ({"sampling": {"top_k": -5}}, "top_k must be"),
        ({"request_id": "a/b"}, "request_id must be"),
        ({"prompt": "and messages"}, "exactly one of"),
        ({"messages": ...}, "exactly one of"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": ..., "token_ids": [2**31]}, r"token_ids\[0\] must be in"),
        ({"deadline_unix_ms": -1}, "deadline_unix_ms must not be negative"),
    ],
)
def test_a_request_that_cannot_be_served_is_a_request_error(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        decode(frame(REQUEST, **changes))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\xc0", "must be a map"),
        (b"\x80\x80", "not msgpack"),
        (b"\x91" * 5000, "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\x81\x01\x02", "not msgpack"),
        (b"\x81\xa1a\xd6\xff\x00\x00\x00\x00", "not msgpack"),  # a timestamp
        (b"\x81\xa1a\xd4\x05\x00", "not msgpack"),  # an extension
        (b"\x81\xa1a\xc7\x00\x05", "not msgpack"),  # an empty extension
        (b"\x81\xa1a\xa1\xff", "not msgpack"),  # text that is not UTF-8
        (bytes(MAX_FRAME_BYTES + 1), "over the limit"),
    ],
)
def test_bytes_that_are_no_frame_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decode(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "must be a map"),
        (b'{"kind": "step.v1"}', "only request.v1 may be JSON"),
        (b'{"request_id": "r", "prompt": "\\ud800"}', "surrogate"),
        (b'{"request_id": "r", "prompt": "x", "sampling": {"top_p": NaN}}', "not JSON"),
        (b'{"request_id": "r", "prompt": "x", "sampling": {"top_p": 1' + b"0" * 999, "not JSON"),
        (b'{"request_id": "r", "prompt": "x", "sampling": {"top_p": 1' + b"0" * 999 + b"}}", "in"),
    ],
)
def test_json_that_is_no_request_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decode(body, JSON)


def test_an_unknown_content_type_is_refused() -> None:
    with pytest.raises(DecodeError, match="content_type must be"):
        decode(encode(REQUEST), "application/pickle")


sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 2**31 - 1),
    top_p=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 1_048_576),
    ignore_eos=st.booleans(),
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


def mutate_bytes(body: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(body))
    match rng.randrange(5):
        case 0:
            return body[:at] + bytes([body[at] ^ (1 << rng.randrange(8))]) + body[at + 1 :]
        case 1:
            return body[:at] + rng.randbytes(rng.randint(1, 4)) + body[at:]
        case 2:
            return body[:at] + body[at + rng.randint(1, 4) :]
        case 3:
            return body[:at]
        case _:
            return (
                body[:at]
                + bytes([rng.choice(b"\x80\x90\xa0\xc0\xc1\xc4\xc7\xcf\xd4\xdd\xdf\xff")])
                + body[at + 1 :]
            )


ODD_VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**63, 2**64 - 1, -(2**63), 0.0, -0.5, 1.5, math.nan,
    math.inf, "", "x", "f16", "\x00", b"", b"\x00" * 8, [], [[]], [1], [True], ["x"], {}, {"x": 1},
]  # fmt: skip


def mutate_structure(value: Any, rng: random.Random) -> Any:
    """Swap, drop or add one value at a random depth."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate_structure(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value[:at] + value[at + 1 :]
        return [*value[:at], mutate_structure(value[at], rng), *value[at + 1 :]]
    return rng.choice(ODD_VALUES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_mutated_frames_give_a_message_or_one_error(name: str) -> None:
    rng = random.Random(f"cellpipe {name}")
    body = encode(EXAMPLES[name])
    fields = msgpack.unpackb(body)
    num_valid = num_refused = 0

    for number in range(100_000 // len(EXAMPLES) + 1):
        if number % 2:
            mutant = mutate_bytes(body, rng)
        else:
            mutant = bytes(msgpack.packb(mutate_structure(fields, rng)))
        try:
            decode(mutant)
        except (DecodeError, RequestError):
            num_refused += 1
        else:
            num_valid += 1

    # Both must happen often, or the mutations test nothing.
    assert min(num_valid, num_refused) > 500
