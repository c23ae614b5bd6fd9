"""The kinds of fields that requests are made of, and what is refused by name. Knows no endpoint."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, JsonValue, WithJsonSchema
from pydantic_core import PydanticCustomError

from shared.sampling_params import BIAS_KEY, MAX_BIAS, MAX_BIASES

MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_BATCH = 128


@dataclass(frozen=True, slots=True)
class Peers:
    """What other servers do with a field, for the table in docs/api.md; `note` is about ours."""

    openai: bool
    llama_server: bool
    vllm: bool
    note: str = ""


def refused(*no_ops: JsonValue) -> Any:
    """The default of a field that is not supported: it takes None, and what asks for nothing."""
    return Field(default=None, json_schema_extra={"enum": [None, *no_ops]})


def check_refused(value: Any, no_ops: list[Any]) -> None:
    """None for a value that asks for nothing. Raises `PydanticCustomError` for any other."""
    if not any(_same(value, no_op) for no_op in no_ops):
        raise PydanticCustomError("unsupported", "is not supported by this server")


def _same(value: object, no_op: object) -> bool:
    if value is None or isinstance(value, bool) or isinstance(no_op, bool):
        return value is no_op
    return bool(value == no_op)


def _as_stops(value: Any) -> Any:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise PydanticCustomError(
            "stop", f"must be at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters"
        )
    if not all(stops):
        raise PydanticCustomError("stop", "must not hold an empty string")
    return tuple(stops)


def _as_content(value: Any) -> Any:
    """Text of a message: a string, or a list of text parts, which are joined."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise PydanticCustomError("content", "must be a string or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PydanticCustomError("content", "must be a string or a list of text parts")
        if part["type"] != "text":
            raise PydanticCustomError(
                "content", f"holds a part of type {part['type']!r:.40}; only text is supported"
            )
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise PydanticCustomError("content", "holds a text part without text alone")
    return "".join(part["text"] for part in value)


def _as_tool_choice(value: Any) -> Any:
    if value in TOOL_CHOICES or isinstance(value, dict):
        return value
    raise PydanticCustomError("tool_choice", f"must be {', '.join(TOOL_CHOICES)} or a function")


def _as_prompts(value: Any) -> Any:
    """A prompt, or a list of them: each a text or a list of token ids."""
    if isinstance(value, str) or _is_token_ids(value):
        prompts: list[Any] = [value]
    else:
        prompts = value
    if not isinstance(prompts, list) or not prompts:
        raise PydanticCustomError(
            "prompt", "must be a string, a list of strings, token ids or a list of their lists"
        )
    if len(prompts) > MAX_BATCH:
        raise PydanticCustomError("prompt", f"must be at most {MAX_BATCH} prompts")
    for prompt in prompts:
        if not (isinstance(prompt, str) or _is_token_ids(prompt)):
            raise PydanticCustomError(
                "prompt", "must be a string, a list of strings, token ids or a list of their lists"
            )
    return tuple(p if isinstance(p, str) else tuple(p) for p in prompts)


def _as_bias(value: Any) -> Any:
    """(token id, bias) by ascending id, from OpenAI's map of ids as texts."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise PydanticCustomError("bias", "must be a map of token ids to numbers")
    if len(value) > MAX_BIASES:
        raise PydanticCustomError("bias", f"must be at most {MAX_BIASES} tokens, got {len(value)}")
    pairs: dict[int, float] = {}
    for name, bias in value.items():
        if not BIAS_KEY.match(name):
            raise PydanticCustomError("bias", f"must have token ids as keys, got {name!r:.40}")
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PydanticCustomError(
                "bias", f"of token {name} must be a number in -100..100, got {bias!r:.40}"
            )
        pairs[int(name)] = float(bias)
    return tuple(sorted(pairs.items()))


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise PydanticCustomError("number", "must be a finite number")
    return value


TOOL_CHOICES = ("none", "auto", "required")
_TEXTS = {"type": "array", "items": {"type": "string"}}
_TOKENS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}

Number = Annotated[float, AfterValidator(_finite)]
Stops = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_stops),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {**_TEXTS, "maxItems": MAX_STOPS}, {"type": "null"}]}
    ),
    Field(strict=False),
]
Bias = Annotated[
    tuple[tuple[int, float], ...],
    BeforeValidator(_as_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "maxProperties": MAX_BIASES,
                    "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"},
                    "additionalProperties": {
                        "type": "number",
                        "minimum": -MAX_BIAS,
                        "maximum": MAX_BIAS,
                    },
                },
                {"type": "null"},
            ]
        }
    ),
    Field(strict=False),
]
Content = Annotated[
    str,
    BeforeValidator(_as_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | dict[str, Any],
    BeforeValidator(_as_tool_choice),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": list(TOOL_CHOICES)}, {"type": "object"}]}),
]
Prompts = Annotated[
    tuple[str | tuple[int, ...], ...],
    BeforeValidator(_as_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {**_TEXTS, "minItems": 1, "maxItems": MAX_BATCH},
                _TOKENS,
                {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": MAX_BATCH},
            ]
        }
    ),
]
