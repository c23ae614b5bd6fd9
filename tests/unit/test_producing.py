"""The schemas of docs/producing.md allow what the decoder takes, and nothing else."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.broker.base import MAX_BODY_BYTES
from shared.codec import JSON, decode, encode_json
from shared.errors import PermanentError
from shared.messages import Reply, Request, SamplingParams, Token
from shared.topology import (
    BATCH_QUEUE,
    MAX_QUEUED_REQUEST_BYTES,
    MAX_QUEUED_REQUESTS,
    REQUESTS_QUEUE,
)
from tests.producing import PAGE, schemas
from tests.unit.codec_examples import EXAMPLES

SCHEMAS = schemas()
VALID: list[dict[str, Any]] = [
    {"request_id": "r", "prompt": "hello"},
    {"kind": "request.v1", "request_id": "r-1_Z", "messages": [{"role": "user", "content": "x"}]},
    {"request_id": "r", "token_ids": [0, 2**31 - 1], "sampling": {"temperature": 0.5}},
    {"request_id": "r", "prompt": "x", "messages": None, "token_ids": None},
    {"request_id": "r", "prompt": "", "model": "m", "stream": True, "deadline_unix_ms": 1},
]
EDGES: dict[str, list[Any]] = {
    "request_id": ["a", "", "-a", "a" * 64, "a" * 65, "a.b", "ä", None, 1],
    "kind": ["request.v1", "reply.v1", "request.v2", "step.v1", "token.v1", None, 1],
    "model": ["", "m", None, 1],
    "prompt": ["", "x", None, 1, [], {}],
    "messages": [
        None, [], {}, "x", [1], [{}], [{"role": "user"}], [{"role": "user", "content": None}],
        [{"role": 1, "content": "x"}], [{"role": "user", "content": "x", "name": 1}],
    ],
    "token_ids": [None, [], [0], [-1], [2**31 - 1], [2**31], [True], ["1"], [1.5], {}, "x"],
    "deadline_unix_ms": [0, 1, -1, 2**53 - 1, 2**53, None, True, "1", 1.5],
    "stream": [True, False, None, 0, "true"],
    "sampling": [{}, None, [], {"unknown": 1}, 1],
    "response_format": [
        None, {}, [], "json_object", {"type": "text"}, {"type": "json_object"}, {"type": "xml"},
        {"type": "json_object", "schema": {}}, {"type": "json_schema"}, {"type": None},
        *[
            {"type": "json_schema", "json_schema": value}
            for value in (
                None, {}, {"schema": {"type": "object"}}, {"schema": True}, {"schema": None},
                {"schema": 1}, {"schema": {}, "strict": None}, {"schema": {}, "strict": 1},
                {"schema": {}, "name": "n"}, {"schema": {}, "more": 1},
            )
        ],
        *[
            {"type": "tool_calls", "functions": value}
            for value in (
                None, [], {}, [1], [{}], [{"name": "f"}], [{"name": "f g"}], [{"name": 1}],
                [{"name": "f", "parameters": {}}], [{"name": "f", "parameters": None}],
                [{"name": "f", "parameters": 1}], [{"name": "f", "more": 1}],
            )
        ],
        {"type": "tool_calls", "functions": [{"name": "f"}], "parallel": True},
        {"type": "tool_calls", "functions": [{"name": "f"}], "parallel": 1},
    ],
    "unknown": [None, 1, [], {}],
}  # fmt: skip
SAMPLING_EDGES: dict[str, list[Any]] = {
    "temperature": [0, 0.5, 100, 100.5, -0.5, -1, 101, None, True, "1", 2**64],
    "top_k": [0, 1, -1, 2**31 - 1, 2**31, None, True, "1", 0.5],
    "top_p": [0, 1, 0.5, 1.5, -0.5, 2, None, False, "1"],
    "seed": [None, 0, 1, -1, 2**64 - 1, 2**64, True, "1", 0.5],
    "max_tokens": [0, 1, -1, 1_048_576, 1_048_577, None, True, "1", 1.5],
    "ignore_eos": [True, False, None, 0],
    "speculation": [True, False, None, 1],
    "min_p": [0, 1, 0.5, -0.1, 1.1, None, True, "1"],
    "frequency_penalty": [0, -2, 2, 2.5, -2.5, None, True, "1"],
    "presence_penalty": [0, -2, 2, 2.5, -2.5, None, True, "1"],
    "repetition_penalty": [1, 0.01, 100, 0, 0.009, 100.5, None, True, "1"],
    "logit_bias": [
        None, {}, {"0": 1}, {"999999999": -100}, {"1": 100.5}, {"1": -101}, {"1": True}, {"1": "2"},
        {"1": None}, {"01": 1}, {"9999999999": 1}, {"x": 1}, {"-1": 1}, [], [1], 1, "x",
        {str(i): 1 for i in range(300)}, {str(i): 1 for i in range(301)},
    ],
    "logprobs": [None, 0, 20, 21, -1, True, "1", 0.5],
    "unknown": [None, 1],
}  # fmt: skip


def is_taken(raw: dict[str, Any]) -> bool:
    try:
        return isinstance(decode(json.dumps(raw).encode(), JSON), Request)
    except PermanentError:
        return False


def is_allowed(raw: dict[str, Any]) -> bool:
    return jsonschema.Draft202012Validator(SCHEMAS["request.v1"]).is_valid(raw)


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_schemas_are_schemas(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[kind])


@pytest.mark.parametrize("raw", VALID)
def test_what_is_valid_is_taken_and_allowed(raw: dict[str, Any]) -> None:
    assert is_taken(raw)
    assert is_allowed(raw)


@pytest.mark.parametrize("name", EDGES)
def test_at_the_edges_of_each_field_decoder_and_schema_agree(name: str) -> None:
    answers = set()
    for raw in VALID:
        for value in EDGES[name]:
            changed = raw | {name: value}
            assert is_taken(changed) == is_allowed(changed), changed
            answers.add(is_taken(changed))
        without = {key: value for key, value in raw.items() if key != name}
        assert is_taken(without) == is_allowed(without), without
    assert answers == ({True} if name == "unknown" else {True, False})


@pytest.mark.parametrize("name", SAMPLING_EDGES)
def test_at_the_edges_of_each_parameter_decoder_and_schema_agree(name: str) -> None:
    answers = set()
    for value in SAMPLING_EDGES[name]:
        changed = VALID[0] | {"sampling": {name: value}}
        assert is_taken(changed) == is_allowed(changed), changed
        answers.add(is_taken(changed))
    assert answers == ({True} if name == "unknown" else {True, False})


_PARTS = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in EDGES.items()}
)
_SAMPLING = st.fixed_dictionaries(
    {}, optional={name: st.sampled_from(values) for name, values in SAMPLING_EDGES.items()}
)


@settings(max_examples=300, deadline=None)
@given(raw=st.sampled_from(VALID), parts=_PARTS, sampling=st.none() | _SAMPLING)
def test_several_edges_at_once(
    raw: dict[str, Any], parts: dict[str, Any], sampling: dict[str, Any] | None
) -> None:
    changed = raw | parts | ({} if sampling is None else {"sampling": sampling})

    assert is_taken(changed) == is_allowed(changed)


@pytest.mark.parametrize(
    ("kind", "message_class"), [("request.v1", Request), ("reply.v1", Reply), ("token.v1", Token)]
)
def test_no_field_is_left_out_or_made_up(kind: str, message_class: type[Any]) -> None:
    properties = SCHEMAS[kind]["properties"]

    assert set(properties) - {"kind"} == {field.name for field in fields(message_class)}
    if kind == "request.v1":
        defaults = SamplingParams()
        for name, schema in properties["sampling"]["properties"].items():
            default = getattr(defaults, name)
            assert schema["default"] == (dict(default) if name == "logit_bias" else default), name
        assert len(properties["sampling"]["properties"]) == len(fields(SamplingParams))


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_we_send_is_what_the_schema_says(name: str) -> None:
    message = EXAMPLES[name]
    if isinstance(message, Request | Reply | Token):
        kind = f"{type(message).__name__.lower()}.v1"
        jsonschema.validate(json.loads(encode_json(message)), SCHEMAS[kind])


def test_names_and_numbers_of_the_page_are_ours() -> None:
    text = PAGE.read_text()

    assert f"`{REQUESTS_QUEUE}`" in text
    assert f"`{BATCH_QUEUE}`" in text
    assert f"({MAX_QUEUED_REQUESTS:,} requests or {MAX_QUEUED_REQUEST_BYTES >> 20}" in text
    assert f"at most {MAX_BODY_BYTES >> 20} MiB" in text
