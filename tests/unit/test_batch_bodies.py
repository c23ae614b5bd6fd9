"""What a body in OpenAI's format asks for, and which field is named when it cannot be served."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.batch.bodies import CHAT_URL, COMPLETIONS_URL, URLS, BodyError, request_of
from services.batch.lines import Entry, read_line
from shared.messages import ChatMessage, Request, SamplingParams

MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**body: Any) -> Request:
    return request_of(CHAT_URL, {"messages": MESSAGES} | body, request_id="r", chat_max_tokens=99)


def complete(**body: Any) -> Request:
    return request_of(COMPLETIONS_URL, body, request_id="r", chat_max_tokens=99)


def test_defaults_are_openais() -> None:
    assert chat().sampling == SamplingParams(temperature=1.0, max_tokens=99)
    assert complete(prompt="x").sampling == SamplingParams(temperature=1.0, max_tokens=16)


def test_parameters_are_taken_over() -> None:
    given_ = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 7, "ignore_eos": True}

    request = chat(**given_, max_tokens=3, model="m")

    assert request.sampling == SamplingParams(0.5, 5, 0.9, 7, 3, True)
    assert request.model == "m"
    assert chat(max_completion_tokens=4, max_tokens=3).sampling.max_tokens == 4
    assert chat(temperature=0).sampling.temperature == 0.0
    shaping = {"min_p": 0.1, "frequency_penalty": 1, "presence_penalty": -0.5,
               "repetition_penalty": 1.2}  # fmt: skip
    assert chat(**shaping, logit_bias={"7": 5, "3": -100}).sampling == SamplingParams(
        1.0, max_tokens=99, logit_bias=((3, -100.0), (7, 5.0)), **shaping
    )


def test_log_probabilities_are_asked_for_as_of_openai() -> None:
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).sampling.logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert complete(prompt="x", logprobs=0).sampling.logprobs == 0
    assert complete(prompt="x", logprobs=5).sampling.logprobs == 5
    for wrong in (6, -1, True, "1"):
        with pytest.raises(BodyError, match="logprobs"):
            complete(prompt="x", logprobs=wrong)


def test_content_may_come_in_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

    request = chat(messages=[{"role": "user", "content": parts, "name": "me"}])

    assert request.messages == (ChatMessage("user", "ab"),)


def test_a_chat_may_ask_for_json() -> None:
    schema = {"type": "object", "required": ["a"]}

    request = chat(response_format={"type": "json_schema", "json_schema": {"schema": schema}})

    assert request.response_format is not None
    assert request.response_format.schema == schema
    for wrong, param in [
        ({"type": "json_schema", "json_schema": {"schema": {"not": {}}}}, "json_schema.schema.not"),
        ({"type": "tool_calls", "functions": [{"name": "f"}]}, "type"),
    ]:
        with pytest.raises(BodyError) as raised:
            chat(response_format=wrong)
        assert raised.value.param == f"response_format.{param}"


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2]]])
def test_a_prompt_may_be_token_ids(prompt: Any) -> None:
    assert complete(prompt=prompt).token_ids == (1, 2)


def test_what_asks_for_nothing_is_passed_over() -> None:
    plain = chat()

    assert plain == chat(
        n=1, stream=False, stop=None, logprobs=False, tools=[], frequency_penalty=0.0,
        presence_penalty=0, logit_bias={}, response_format={"type": "text"}, user="me",
        metadata={"a": "b"}, seed=None, temperature=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 2), ("stream", True), ("stop", "x"), ("stop", ["x"]), ("logprobs", 1),
        ("top_logprobs", 2), ("top_logprobs", 21), ("min_p", 2), ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("tools", [{"type": "function"}]), ("response_format", "json_object"),
        ("frequency_penalty", 2.5), ("logit_bias", {"1": 101}), ("logit_bias", [1]),
        ("made_up", 1), ("prompt", "x"),
        ("temperature", -1), ("temperature", "warm"), ("temperature", True), ("top_p", 0),
        ("top_p", 2), ("top_k", -1), ("top_k", 1.5), ("seed", -1), ("seed", 1.5),
        ("max_tokens", 0), ("max_tokens", 2**40), ("model", 7), ("ignore_eos", 1),
        ("messages", []), ("messages", "hello"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(param: str, value: Any) -> None:
    with pytest.raises(BodyError, match=param) as raised:
        chat(**{param: value})

    assert raised.value.param == param


@pytest.mark.parametrize(
    "message",
    [
        1, {}, {"role": "user"}, {"role": 1, "content": "x"}, {"role": "user", "content": 1},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "user", "content": [{"type": "text", "text": 1}]},
        {"role": "tool", "content": "x"}, {"role": "assistant", "tool_calls": [1], "content": "x"},
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_named_by_its_number(message: Any) -> None:
    with pytest.raises(BodyError) as raised:
        chat(messages=[*MESSAGES, message])

    assert raised.value.param.startswith("messages[1]")


@pytest.mark.parametrize("prompt", [None, 1, [], ["a", "b"], [1, "a"], [-1], [True], {}])
def test_a_prompt_that_cannot_be_read_is_named(prompt: Any) -> None:
    with pytest.raises(BodyError) as raised:
        complete(prompt=prompt)

    assert raised.value.param == "prompt"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
_FIELDS = st.sampled_from(
    ["messages", "prompt", "model", "temperature", "seed", "stop", "n", "max_tokens", "tools",
     "top_k", "logit_bias", "logprobs", "top_logprobs", "min_p", "presence_penalty",
     "response_format", "ignore_eos", "x"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    url=st.sampled_from(URLS) | _JSON,
    method=st.just("POST") | _JSON,
    body=st.dictionaries(_FIELDS, _JSON, max_size=4) | _JSON,
)
def test_any_line_of_json_is_a_request_or_says_why_not(url: Any, method: Any, body: Any) -> None:
    entry = Entry(1, 0, 0, "a", "r")
    text = json.dumps({"custom_id": "a", "url": url, "method": method, "body": body})

    line = read_line(entry, text.encode(), chat_max_tokens=5)

    assert (line.request is None) == bool(line.error)


@given(text=st.binary(max_size=40))
def test_any_bytes_are_a_line_that_says_what_is_wrong(text: bytes) -> None:
    line = read_line(Entry(1, 0, 0, None, "r"), text, chat_max_tokens=5)

    assert line.request is None
    assert line.error
