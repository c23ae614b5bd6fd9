"""What an answer must be, other than text: JSON, JSON of a schema, or calls of functions.

A format that exists is one whose schemas are taken. Knows no grammar, token or queue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.errors import RequestError
from shared.text.json_schema import Schema, SchemaError, checked_schema

MAX_FORMAT_CHARS = 1 << 16
MAX_FUNCTIONS = 128
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_ANY_OBJECT: Schema = {"type": "object"}


class FormatError(RequestError):
    """A format that is not taken; `path` is the field at fault."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path} {reason}", param=path[:200])
        self.path = path
        self.reason = reason


@dataclass(frozen=True)
class Function:
    """A function that may be called; `parameters_json` is the schema of its arguments."""

    name: str
    parameters_json: str

    @cached_property
    def parameters(self) -> Schema:
        schema: Schema = json.loads(self.parameters_json)
        return schema

    def call_frame(self) -> tuple[str, str]:
        """What is written before and after the arguments of a call."""
        return f'{CALL_BEGIN}\n{{"name": "{self.name}", "arguments": ', f"}}\n{CALL_END}"


@dataclass(frozen=True)
class ResponseFormat:
    """JSON of the schema in `schema_json`, or calls of `functions`: one, or `parallel` more.

    Equal formats are equal values: they are kept as JSON texts.
    """

    schema_json: str = ""
    functions: tuple[Function, ...] = ()
    parallel: bool = False

    def __post_init__(self) -> None:
        assert bool(self.schema_json) != bool(self.functions), "one of the two"
        num_chars = len(self.schema_json) + sum(len(f.parameters_json) for f in self.functions)
        if num_chars > MAX_FORMAT_CHARS:
            raise FormatError(
                "response_format", f"has {num_chars} characters (limit {MAX_FORMAT_CHARS})"
            )

    @property
    def schema(self) -> Schema | None:
        """None for calls."""
        if not self.schema_json:
            return None
        schema: Schema = json.loads(self.schema_json)
        return schema

    def document(self) -> dict[str, Any]:
        """As `read_response_format` takes it."""
        if self.functions:
            functions = [{"name": f.name, "parameters": f.parameters} for f in self.functions]
            return {"type": "tool_calls", "functions": functions, "parallel": self.parallel}
        return {"type": "json_schema", "json_schema": {"schema": self.schema}}


def read_response_format(document: Any, path: str = "response_format") -> ResponseFormat | None:
    """A format in OpenAI's shape, or of type `tool_calls`; None for text.

    Raises `FormatError` that names the field.
    """
    if not isinstance(document, Mapping):
        raise FormatError(path, "must be an object")
    kind = document.get("type")
    allowed = {"type"} | {
        "json_schema": {"json_schema"},
        "tool_calls": {"functions", "parallel"},
    }.get(kind if isinstance(kind, str) else "", set())
    for name in document:
        if name not in allowed:
            raise FormatError(f"{path}.{name!s:.100}", "is not known")
    match kind:
        case "text":
            return None
        case "json_object":
            return json_format(_ANY_OBJECT, path)
        case "json_schema":
            return _read_json_schema(document.get("json_schema"), f"{path}.json_schema")
        case "tool_calls":
            return _read_calls(document, path)
        case _:
            raise FormatError(
                f"{path}.type", f"must be text, json_object or json_schema, got {kind!r:.40}"
            )


def json_format(schema: Any, path: str) -> ResponseFormat:
    """JSON of a schema that stands at `path`. Raises `FormatError`."""
    return ResponseFormat(schema_json=_checked(schema, path))


def read_function(name: Any, parameters: Any, path: str) -> Function:
    """A function at `path`, with its name and parameters. Raises `FormatError`."""
    if not isinstance(name, str) or not FUNCTION_NAME.match(name):
        raise FormatError(f"{path}.name", "must be 1-64 letters, digits, '-' or '_'")
    where = f"{path}.parameters"
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise FormatError(where, "must be an object")
    if parameters.get("type", "object") != "object":
        raise FormatError(f"{where}.type", "must be object")
    return Function(name, _checked({"type": "object", **parameters}, where))


def calls_format(functions: Sequence[Function], *, parallel: bool) -> ResponseFormat:
    """A call of one of the functions, or `parallel` several. Raises `FormatError`."""
    return ResponseFormat(functions=tuple(functions), parallel=parallel)


def _read_json_schema(value: Any, path: str) -> ResponseFormat:
    if not isinstance(value, Mapping):
        raise FormatError(path, "must be an object with a schema")
    for name, part in value.items():
        match name:
            case "schema":
                continue
            case "name" | "description":
                good = part is None or isinstance(part, str)
            case "strict":  # an answer is held to its schema either way
                good = part is None or isinstance(part, bool)
            case _:
                raise FormatError(f"{path}.{name!s:.100}", "is not known")
        if not good:
            raise FormatError(f"{path}.{name}", f"must not be a {type(part).__name__}")
    if value.get("schema") is None:
        raise FormatError(f"{path}.schema", "must be given")
    return json_format(value["schema"], f"{path}.schema")


def _read_calls(document: Mapping[str, Any], path: str) -> ResponseFormat:
    functions = document.get("functions")
    if not isinstance(functions, list) or not 1 <= len(functions) <= MAX_FUNCTIONS:
        raise FormatError(f"{path}.functions", f"must be a list of 1-{MAX_FUNCTIONS} functions")
    parallel = document.get("parallel", False)
    if not isinstance(parallel, bool):
        raise FormatError(f"{path}.parallel", "must be true or false")
    found = []
    for i, item in enumerate(functions):
        where = f"{path}.functions[{i}]"
        if not isinstance(item, Mapping) or not {"name"} <= set(item) <= {"name", "parameters"}:
            raise FormatError(where, "must be an object with a name and parameters")
        found.append(read_function(item["name"], item.get("parameters"), where))
    if len({function.name for function in found}) < len(found):
        raise FormatError(f"{path}.functions", "names a function twice")
    return calls_format(found, parallel=parallel)


def _checked(schema: Any, path: str) -> str:
    try:
        checked = checked_schema(schema)
        text = json.dumps(checked, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except SchemaError as error:
        raise FormatError(
            ".".join(part for part in (path, error.path) if part), error.reason
        ) from error
    except (ValueError, RecursionError) as error:
        raise FormatError(path, f"cannot be read: {error!s:.100}") from error
    if len(text) > MAX_FORMAT_CHARS:
        raise FormatError(path, f"has {len(text)} characters (limit {MAX_FORMAT_CHARS})")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise FormatError(path, "holds half of a surrogate pair") from error
    return text
