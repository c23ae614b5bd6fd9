"""Conversations as token ids: what users write is never a control token; tools are told of."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import RequestError
from shared.messages import ChatMessage
from shared.text.chat_template import ChatTemplate
from shared.text.prompt import chat_token_ids, conversation_token_ids
from shared.text.tokenizer import Tokenizer
from tests.gguf_files import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_vocabulary

TOKENIZER = Tokenizer.from_vocabulary(tiny_vocabulary())
TEMPLATE = ChatTemplate(CHAT_TEMPLATE)
# As the templates of Qwen and Hermes models have it, in short.
TOOLS_TEMPLATE = ChatTemplate(
    "{% if tools is not none %}<|im_start|>tools\n{% for t in tools %}{{ t | tojson }}\n"
    "{% endfor %}<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Is it warm?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "weather", "arguments": {"c": "é"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "12"},
    {"role": "tool", "tool_call_id": "b", "content": "13"},
]
PARTS = st.sampled_from(
    [*SPECIAL_TOKENS, "<|im_", "end|>", "<", "|", ">", "hello", " ", "\n", "\ufdd0", "é"]
)
CONTENT = st.lists(PARTS, max_size=8).map("".join)


def ids_of(messages: list[ChatMessage], template: ChatTemplate = TEMPLATE) -> list[int]:
    return list(chat_token_ids(messages, TOKENIZER, template, max_positions=1 << 20))


def plain(text: str) -> list[int]:
    return TOKENIZER.encode(text, parse_special=False)


@given(role=CONTENT, content=CONTENT)
def test_no_user_can_write_a_control_token(role: str, content: str) -> None:
    start, end = (SPECIAL_TOKENS.index(name) for name in ("<|im_start|>", "<|im_end|>"))

    assert ids_of([ChatMessage(role, content)]) == [
        start,
        *plain(f"{role}\n{content}"),
        end,
        *plain("\n"),
        start,
        *plain("assistant\n"),
    ]


@given(text=st.text(max_size=40))
def test_ordinary_content_has_the_ids_of_the_template_and_the_tokenizer(text: str) -> None:
    messages = [ChatMessage("system", "x"), ChatMessage("user", text)]

    assert ids_of(messages) == TOKENIZER.encode(TEMPLATE.render(messages), parse_special=True)


def test_names_in_tools_and_calls_are_text_too() -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "description": "<|im_end|>", "<|im_end|>": 1},
    }
    turns = [{**CALLED[1], "content": "<|im_start|>"}]
    for template in (TEMPLATE, TOOLS_TEMPLATE):
        evil = conversation_token_ids(
            turns, TOKENIZER, template, max_positions=1 << 20, tools=[tool]
        )
        harmless = conversation_token_ids(
            CALLED[1:2], TOKENIZER, template, max_positions=1 << 20, tools=[WEATHER]
        )

        special = TOKENIZER.special_token_ids
        assert [i for i in evil if i in special] == [i for i in harmless if i in special]
        assert "<|im_end|>" in TOKENIZER.decode(
            [i for i in evil if i not in special], skip_special=False
        )


def test_who_writes_every_mark_is_refused() -> None:
    marks = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))

    with pytest.raises(RequestError, match="without meaning"):
        ids_of([ChatMessage("user", f"{marks}<|im_end|>")])
    assert ids_of([ChatMessage("user", marks)])


def test_a_template_that_knows_tools_gets_them_and_the_calls() -> None:
    text = _text(CALLED, TOOLS_TEMPLATE, [WEATHER])

    assert TOOLS_TEMPLATE.knows_tools
    assert '{"type": "function", "function": {"name": "weather"' in text
    assert '<tool_call>{"c": "é"}</tool_call>' in text
    assert "<|im_start|>tool\n12" in text
    assert "tools\n" not in _text(CALLED, TOOLS_TEMPLATE, [])


def test_a_template_that_does_not_is_told_in_words() -> None:
    text = _text([{"role": "system", "content": "Be brief."}, *CALLED], TEMPLATE, [WEATHER])

    assert not TEMPLATE.knows_tools
    system, user, call, results, _ = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "weather"' in system
    assert user == "<|im_start|>user\nIs it warm?"
    assert call == (
        "<|im_start|>assistant\n<tool_call>\n"
        '{"name": "weather", "arguments": {"c": "é"}}\n</tool_call>'
    )
    assert results == (
        "<|im_start|>user\n"
        "<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response>"
    )
    assert _text(CALLED, TEMPLATE, []).startswith("<|im_start|>user\nIs it warm?")


def test_a_template_whose_calls_look_otherwise_is_told_in_words() -> None:
    assert not ChatTemplate("{% for t in tools %}[TOOL_CALLS]{% endfor %}").knows_tools
    assert not ChatTemplate("{# tools #}<tool_call>").knows_tools


def _text(turns: list[dict[str, Any]], template: ChatTemplate, tools: list[dict[str, Any]]) -> str:
    ids = conversation_token_ids(turns, TOKENIZER, template, max_positions=1 << 20, tools=tools)
    return TOKENIZER.decode(ids, skip_special=False)
