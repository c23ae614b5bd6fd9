"""A body means the same in a batch as by HTTP, and what is wrong with a line is told by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.batch.lines import KINDS, Entry, Line, Reading, read_line
from shared.api.ask import Ask, num_choices, read_ask
from shared.api.errors import ApiError, api_error
from shared.api.schema import ChatCompletion, Generation, TextCompletion, read_body
from shared.errors import CellpipeError
from shared.messages import Request
from tests.rig_model import rig_api_model

CHAT_URL, COMPLETIONS_URL = KINDS
MESSAGES = [{"role": "user", "content": "hello"}]
ENTRY = Entry(1, 0, 0, "a", "r")
MODEL = rig_api_model()


def line_of(url: Any, body: Any, method: Any = "POST", **reading: Any) -> Line:
    text = json.dumps({"custom_id": "a", "url": url, "method": method, "body": body})
    return read_line(ENTRY, text.encode(), Reading(**{"model": MODEL, **reading}))


def chat(**body: Any) -> tuple[Request, ...]:
    line = line_of(CHAT_URL, {"messages": MESSAGES} | body)
    assert line.error is None, line.error
    return line.requests


def by_http(url: str, body: Any) -> Ask | ApiError:
    """What a gateway makes of the body."""
    try:
        read: Generation = read_body(json.dumps(body).encode(), KINDS[url])
        num_choices(read)
        return read_ask(read, MODEL)
    except ApiError as error:
        return error
    except CellpipeError as error:
        return api_error(error)


def test_a_chat_goes_on_to_the_end_of_the_context_unless_told_otherwise() -> None:
    (request,) = chat()
    room = MODEL.max_positions - len(request.token_ids or ())
    body = {"messages": MESSAGES}

    assert request.sampling.max_tokens == room
    assert line_of(CHAT_URL, body, chat_tokens=7).requests[0].sampling.max_tokens == 7
    assert line_of(CHAT_URL, body, chat_tokens=10**6).requests[0].sampling.max_tokens == room
    assert line_of(COMPLETIONS_URL, {"prompt": "x"}).requests[0].sampling.max_tokens == 16


def test_every_choice_and_every_prompt_is_a_request_of_its_own() -> None:
    two = chat(n=2, seed=7, max_tokens=3)
    line = line_of(COMPLETIONS_URL, {"prompt": ["x", [5, 6]], "n": 2, "max_tokens": 3})

    assert [r.sampling.seed for r in two] == [7, 8]
    assert [r.request_id for r in two] == ["r", "r-c1"]
    assert [r.token_ids for r in line.requests[2:]] == [(5, 6)] * 2
    assert len({r.request_id for r in line.requests}) == 4


def test_the_model_may_be_called_by_its_name_and_its_id_alone() -> None:
    for name in (MODEL.model_name, MODEL.model_id):
        assert line_of(CHAT_URL, {"messages": MESSAGES, "model": name}).error is None
    refused = line_of(CHAT_URL, {"messages": MESSAGES, "model": "mine"}).error
    assert refused is not None
    assert (refused.status, refused.param, refused.code) == (404, "model", "model_not_found")


def test_a_line_may_shape_logits_and_ask_for_their_probabilities() -> None:
    (shaped,) = chat(min_p=0.1, presence_penalty=-0.5, logit_bias={"7": 5}, logprobs=True)
    (told,) = line_of(COMPLETIONS_URL, {"prompt": "x", "logprobs": 5}).requests

    assert (shaped.sampling.min_p, shaped.sampling.logit_bias) == (0.1, ((7, 5.0),))
    assert (shaped.sampling.presence_penalty, shaped.sampling.logprobs) == (-0.5, 0)
    assert told.sampling.logprobs == 5


def test_a_line_may_ask_for_all_that_http_serves() -> None:
    schema = {"type": "object", "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tool = {"type": "function", "function": {"name": "look"}}

    (shaped,) = chat(min_p=0.1, presence_penalty=-0.5, logit_bias={"7": 5}, logprobs=True)
    (formed,) = chat(response_format=wanted)
    line = line_of(
        CHAT_URL, {"messages": MESSAGES, "tools": [tool]}, model=replace(MODEL, max_positions=4096)
    )

    assert (shaped.sampling.min_p, shaped.sampling.logit_bias) == (0.1, ((7, 5.0),))
    assert shaped.sampling.logprobs == 0
    assert formed.response_format is not None
    assert formed.response_format.schema == schema
    assert line.ask is not None
    assert line.ask.form.functions == ("look",)


def test_a_stream_is_not_for_a_batch() -> None:
    refused = line_of(CHAT_URL, {"messages": MESSAGES, "stream": True}).error

    assert refused is not None
    assert (refused.status, refused.param) == (400, "stream")


_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "x"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
_FIELDS = sorted(
    {*ChatCompletion.model_fields, *TextCompletion.model_fields, "made_up"} - {"stream"}
)
_GOOD = {CHAT_URL: {"messages": MESSAGES}, COMPLETIONS_URL: {"prompt": "x"}}


@settings(max_examples=300, deadline=None)
@given(
    url=st.sampled_from(sorted(KINDS)),
    changes=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3),
)
def test_a_body_means_the_same_in_a_batch_as_by_http(url: str, changes: dict[str, Any]) -> None:
    body = {**_GOOD[url], **changes}

    line, answer = line_of(url, body), by_http(url, body)

    if isinstance(answer, ApiError):
        assert line.error is not None
        assert (line.error.status, line.error.body()) == (answer.status, answer.body())
    else:
        assert line.ask == answer
        assert line.requests


@settings(max_examples=200, deadline=None)
@given(
    url=st.sampled_from(sorted(KINDS)) | _JSON,
    method=st.just("POST") | _JSON,
    body=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4) | _JSON,
)
def test_any_line_of_json_is_a_request_or_says_why_not(url: Any, method: Any, body: Any) -> None:
    line = line_of(url, body, method)

    assert bool(line.requests) == (line.error is None)
    assert line.error is None or line.error.message


@given(text=st.binary(max_size=40))
def test_any_bytes_are_a_line_that_says_what_is_wrong(text: bytes) -> None:
    line = read_line(Entry(1, 0, 0, None, "r"), text, Reading(MODEL))

    assert line.requests == ()
    assert line.error is not None


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (1, "messages[1]"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "messages[1].content"),
    ],
)
def test_a_message_that_cannot_be_read_is_named_by_its_number(message: Any, param: str) -> None:
    refused = line_of(CHAT_URL, {"messages": [*MESSAGES, message]}).error

    assert refused is not None
    assert refused.param == param
