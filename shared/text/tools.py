"""Tells a model whose chat template knows no tools what it may call, in words. Pure.

The form is that of Hermes and Qwen: signatures between <tools> tags, calls between <tool_call> tags
and results between <tool_response> tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shared.text.response_format import CALL_BEGIN, CALL_END

Turn = Mapping[str, Any]
"""A message as a template takes it: role, content, and tool_calls where there are any."""


def turns_in_words(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The conversation for a template that knows system, user and assistant and text alone.

    The tools are added to the system message; results of calls become a user's turn.
    """
    plain = _without_tool_turns(turns)
    if not tools:
        return plain
    text = _tools_text(tools)
    if plain and plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    signatures = "\n".join(_dump(tool) for tool in tools)
    return (
        "You have functions that you may call to help the user. "
        "These are their signatures, between <tools> tags:\n"
        f"<tools>\n{signatures}\n</tools>\n\n"
        "To call a function, write its name and its arguments as JSON between tags, like this:\n"
        f'{CALL_BEGIN}\n{{"name": "the function", "arguments": {{"an argument": "its value"}}}}\n'
        f"{CALL_END}"
    )


def _without_tool_turns(turns: Sequence[Turn]) -> list[Turn]:
    plain: list[Turn] = []
    after_result = False
    for turn in turns:
        is_result = turn["role"] == "tool"
        if is_result:
            text = f"<tool_response>\n{turn['content']}\n</tool_response>"
            if after_result:  # the results of one turn's calls are one turn
                plain[-1] = {"role": "user", "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
        elif turn.get("tool_calls"):
            calls = [call["function"] for call in turn["tool_calls"]]
            texts = [turn["content"]] if turn["content"] else []
            texts += [
                f'{CALL_BEGIN}\n{{"name": {_dump(call["name"])}, '
                f'"arguments": {_dump(call["arguments"])}}}\n{CALL_END}'
                for call in calls
            ]
            plain.append({"role": turn["role"], "content": "\n".join(texts)})
        else:
            plain.append({"role": turn["role"], "content": turn["content"]})
        after_result = is_result
    return plain


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
