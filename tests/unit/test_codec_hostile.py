"""The codec refuses what is no valid message, by name and with one of two errors."""

from __future__ import annotations

import math
import random
from typing import Any

import msgpack
import pytest

from shared.codec import JSON, MAX_FRAME_BYTES, decode, encode
from shared.errors import DecodeError, RequestError
from tests.fuzz.mutations import mutate_bytes, mutate_structure
from tests.unit.codec_examples import DRAFTED_STEP, EXAMPLES, REQUEST, STEP, frame


def tensor(**changes: Any) -> dict[str, Any]:
    return {"h": {"dtype": "f32", "shape": [1, 2], "data": bytes(8)} | changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "step.v9"}, "kind must be one of"),
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
        ({"draft": ...}, "draft is missing"),
        ({"accepted": ...}, "accepted is missing"),
        ({"draft": [9]}, "one position more, got 3"),
        ({"draft": [9, 8, 7]}, "one position more, got 3"),
        ({"draft": [9, True]}, r"draft\[1\] must be an integer"),
        ({"draft": [9, -1]}, r"draft\[1\] must be in"),
        ({"draft": "98"}, "draft must be an array"),
        ({"sample": False}, "must be sampled"),
        ({"accepted": list(range(65))}, "at most 64"),
        ({"draft": list(range(65))}, "at most 64"),
        ({"position": 1}, "accepted holds more than the 1 before it"),
    ],
)
def test_a_wrong_draft_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(DecodeError, match=words):
        decode(frame(DRAFTED_STEP, **changes))


@pytest.mark.parametrize(
    "bias",
    [
        [1], 5, {"x": 1}, {"-1": 1}, {"": 1}, {"1.0": 1}, {"07": 1}, {"9999999999": 1},
        {"\u0661": 1}, {b"1": 1}, {"1": True}, {"1": "2"}, {"1": None},
        {"1" * 99: 1}, {str(i): 1 for i in range(301)},
    ],
)  # fmt: skip
def test_a_bias_that_is_no_map_of_token_ids_is_refused(bias: Any) -> None:
    with pytest.raises(DecodeError, match="logit_bias"):
        decode(frame(REQUEST, sampling={"logit_bias": bias}))


@pytest.mark.parametrize(
    "logprobs",
    [
        1, [], {}, {"logprob": -1}, {"top": []}, {"logprob": "1", "top": []},
        {"logprob": math.nan, "top": []}, {"logprob": -1e300, "top": []},
        {"logprob": -1.0, "top": [1]},
        {"logprob": -1.0, "top": [[1]]}, {"logprob": -1.0, "top": [[-1, 0.5]]},
        {"logprob": -1.0, "top": [[1, math.inf]]}, {"logprob": -1.0, "top": [[1, -1.0]] * 21},
    ],
)  # fmt: skip
def test_log_probabilities_that_are_none_are_refused(logprobs: Any) -> None:
    with pytest.raises(DecodeError):
        decode(frame(EXAMPLES["token.v1"], logprobs=logprobs))
    with pytest.raises(DecodeError):
        decode(frame(EXAMPLES["reply.v1"], logprobs=[logprobs] * 3))


def test_log_probabilities_are_of_each_token_of_a_reply() -> None:
    with pytest.raises(DecodeError, match="those of 3 tokens, got 1"):
        decode(frame(EXAMPLES["reply.v1"], logprobs=[{"logprob": -1.0, "top": []}]))


def test_a_bias_that_is_true_is_refused_when_one_of_1_was_taken() -> None:
    decode(frame(REQUEST, sampling={"logit_bias": {"7": 1}}))

    with pytest.raises(DecodeError, match="logit_bias"):
        decode(frame(REQUEST, sampling={"logit_bias": {"7": True}}))


@pytest.mark.parametrize("value", [1, 0, "yes", None, [True]])
def test_a_switch_that_is_no_bool_is_refused(value: Any) -> None:
    with pytest.raises(DecodeError):
        decode(frame(REQUEST, sampling={"speculation": value}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"temperature": math.nan}}, "temperature must be in 0..100, got nan"),
        ({"sampling": {"top_p": 0}}, "top_p must be in"),
        ({"sampling": {"max_tokens": 0}}, "max_tokens must be in"),
        ({"sampling": {"top_k": -5}}, "top_k must be"),
        ({"sampling": {"min_p": 1.5}}, "min_p must be in 0..1, got 1.5"),
        ({"sampling": {"frequency_penalty": 2.5}}, "frequency_penalty must be in -2..2, got 2.5"),
        ({"sampling": {"presence_penalty": math.nan}}, "presence_penalty must be in"),
        ({"sampling": {"repetition_penalty": 0}}, "repetition_penalty must be in"),
        ({"sampling": {"logprobs": 21}}, "logprobs must be in 0..20 or null, got 21"),
        ({"sampling": {"logprobs": -1}}, "logprobs must be in"),
        ({"sampling": {"logit_bias": {"7": 101}}}, "logit_bias of token 7 must be in -100..100"),
        ({"request_id": "a/b"}, "request_id must be"),
        ({"prompt": "and messages"}, "exactly one of"),
        ({"messages": ...}, "exactly one of"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": ..., "token_ids": [2**31]}, r"token_ids\[0\] must be in"),
        ({"deadline_unix_ms": -1}, "deadline_unix_ms must be in"),
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
        (b'{"kind": "step.v1"}', "only request.v1, reply.v1, token.v1 may be JSON"),
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
    assert min(num_valid, num_refused) > 0.05 * (num_valid + num_refused)


@pytest.mark.parametrize("route", ["w", {"0": "w"}, [1], [b"w"], ["a b"], ["w" * 129], [""] * 1025])
def test_a_route_that_is_no_list_of_worker_ids_is_a_decode_error(route: Any) -> None:
    with pytest.raises(DecodeError, match="route"):
        decode(frame(STEP, route=route))
