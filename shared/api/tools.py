"""What a body says of tools and of the form of its answer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.api.errors import ApiError
from shared.api.schema import ChatCompletion, Message
from shared.text.response_format import (
    FormatError,
    Function,
    ResponseFormat,
    calls_format,
    read_function,
    read_response_format,
)
from shared.text.tool_calls import MAX_FREE_CALLS, ForcedCalls, FreeCalls, arguments_of
from shared.text.tools import Turn

Calls = Literal["", "free", "forced"]


@dataclass(frozen=True, slots=True)
class Form:
    """`tools` are told to the model. `calls`: how they are looked for in its answer, "" not at all;
    `functions` are the names that may be called."""

    tools: tuple[dict[str, Any], ...] = ()
    calls: Calls = ""
    functions: tuple[str, ...] = ()
    parallel: bool = True
    response_format: ResponseFormat | None = None


def read_form(body: ChatCompletion) -> Form:
    """Raises `ApiError` that names the field at fault."""
    try:
        response_format = (
            None if body.response_format is None else read_response_format(body.response_format)
        )
        if response_format is not None and response_format.functions:
            raise FormatError("response_format.type", "must be text, json_object or json_schema")
        form = _read_tools(body, response_format)
    except FormatError as error:
        raise ApiError(400, str(error), param=error.path[:200], code="invalid_value") from None
    if form.response_format is not None and body.ignore_eos:
        raise ApiError(400, "ignore_eos goes with text alone: JSON has an end", param="ignore_eos")
    return form


def call_finder(
    calls: Calls, functions: Sequence[str], *, parallel: bool
) -> FreeCalls | ForcedCalls | None:
    """What finds the calls in one answer; None where there are none."""
    match calls:
        case "free":
            return FreeCalls(functions, max_calls=MAX_FREE_CALLS if parallel else 1)
        case "forced":
            return ForcedCalls(functions)
        case _:
            return None


def turns_of(messages: Sequence[Message]) -> list[Turn]:
    """Messages as a template takes them. Raises `ApiError` for parts that do not belong."""
    return [_turn(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _read_tools(body: ChatCompletion, response_format: ResponseFormat | None) -> Form:
    choice: Any = body.tool_choice or "auto"
    functions = []
    for i, tool in enumerate(body.tools or ()):
        # Without a force on it the schema is only told: whatever it says is taken.
        function = Function(tool.function.name, "{}")
        read_function(function.name, {}, f"tools[{i}].function")
        functions.append(function)
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise FormatError("tools", "names a function twice")
    if isinstance(choice, dict):
        choice = _named(choice, names)
    elif choice == "required" and not names:
        raise FormatError("tool_choice", "is for requests with tools")
    if not names or choice == "none":
        return Form(response_format=response_format)
    if response_format is not None:
        raise FormatError(
            "response_format", "must be text beside tools, unless tool_choice is none"
        )
    parallel = body.parallel_tool_calls is not False
    tools = tuple(tool.model_dump(exclude_none=True) for tool in body.tools or ())
    if choice == "auto":
        return Form(tools, "free", tuple(names), parallel)
    wanted = [
        read_function(tool.function.name, tool.function.parameters, f"tools[{i}].function")
        for i, tool in enumerate(body.tools or ())
        if choice in ("required", tool.function.name)
    ]
    parallel = parallel and choice == "required"
    forced = calls_format(wanted, parallel=parallel)
    return Form(tools, "forced", tuple(f.name for f in wanted), parallel, forced)


def _named(choice: dict[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function")
    if set(choice) != {"type", "function"} or choice["type"] != "function":
        raise FormatError(
            "tool_choice", 'must be none, auto, required or {"type": "function", "function": …}'
        )
    if not isinstance(function, dict) or set(function) != {"name"}:
        raise FormatError("tool_choice.function", "must be an object with a name")
    name = function["name"]
    if not isinstance(name, str) or name not in names:
        raise FormatError("tool_choice.function.name", f"is none of the tools: {name!r:.80}")
    return name


def _turn(path: str, message: Message) -> Turn:
    role = "system" if message.role == "developer" else message.role
    if message.tool_calls and role != "assistant":
        raise ApiError(400, f"{path}.tool_calls is for assistants", param=f"{path}.tool_calls")
    if message.tool_call_id is not None and role != "tool":
        raise ApiError(400, f"{path}.tool_call_id is for tools", param=f"{path}.tool_call_id")
    if message.content is None and not message.tool_calls:
        raise ApiError(
            400,
            f"missing required parameter: {path}.content",
            param=f"{path}.content",
            code="missing_required_parameter",
        )
    turn: dict[str, Any] = {"role": role, "content": message.content or ""}
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": arguments_of(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return turn
