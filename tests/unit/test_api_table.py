"""The table of fields says of each field of the schema what is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import completion_create_params as chat_params
from pydantic.fields import FieldInfo

from services.gateway.openapi import BODIES
from services.gateway.table import page_with_tables, tables
from shared.api.fields import Peers
from shared.api.schema import (
    Body,
    ChatCompletion,
    Message,
    StreamOptions,
    TextCompletion,
    ToolFunction,
)

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
EVERY_BODY = [*BODIES.values(), Message, StreamOptions, ToolFunction]


def test_the_page_about_the_api_is_that_of_the_schema() -> None:
    page = PAGE.read_text()

    assert page_with_tables(page) == page, "python -m services.gateway.table docs/api.md"


@pytest.mark.parametrize("body", EVERY_BODY)
def test_every_field_of_the_schema_has_its_row(body: type[Body]) -> None:
    rows = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))

    assert set(body.model_fields) <= rows


def test_a_field_that_does_not_say_what_others_do_has_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Fresh(Body):
        added: int = 0

    monkeypatch.setitem(BODIES, "/fresh", Fresh)

    with pytest.raises(ValueError, match="added"):
        tables()


@pytest.mark.parametrize(
    ("body", "theirs"),
    [
        (ChatCompletion, [chat_params.CompletionCreateParamsBase,
                          chat_params.CompletionCreateParamsStreaming]),
        (TextCompletion, [text_params.CompletionCreateParamsBase,
                          text_params.CompletionCreateParamsStreaming]),
        (StreamOptions, [ChatCompletionStreamOptionsParam]),
        (Message, [ChatCompletionUserMessageParam, ChatCompletionAssistantMessageParam,
                   ChatCompletionToolMessageParam]),
    ],
)  # fmt: skip
def test_openais_column_is_what_its_client_takes(body: type[Body], theirs: list[Any]) -> None:
    taken = {name for kind in theirs for name in kind.__annotations__}
    said = {name for name, field in body.model_fields.items() if peers_of(field).openai}

    # It gives annotations, and does not take them back.
    assert said - {"annotations"} == set(body.model_fields) & taken


def peers_of(field: FieldInfo) -> Peers:
    return next(m for m in field.metadata if isinstance(m, Peers))
