"""Schemas that are not taken are refused by name, before they cost anything."""

from __future__ import annotations

from typing import Any

import pytest

from shared.text.json_schema import (
    MAX_DEPTH,
    MAX_PROPERTIES,
    MAX_SCHEMAS,
    SchemaError,
    checked_schema,
)
from shared.text.response_format import FormatError, read_function, read_response_format

TEXT = {"type": "string"}


def nested(depth: int) -> Any:
    schema: Any = TEXT
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int) -> dict[str, Any]:
    """Definitions each of which refers to the next, the last to a text."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": TEXT}}


def test_notes_are_left_out_and_order_is_kept() -> None:
    schema = {
        "title": "T",
        "type": "object",
        "properties": {"title": {**TEXT, "description": "d"}, "b": True, "a": {"default": 1}},
    }

    checked = checked_schema(schema)

    assert checked == {
        "type": "object",
        "properties": {"title": TEXT, "b": True, "a": {}},
    }
    assert isinstance(checked, dict)
    assert list(checked["properties"]) == ["title", "b", "a"]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"not": TEXT}, "not"),
        ({"properties": {"a": {"contains": TEXT}}}, "properties.a.contains"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"anyOf": [TEXT, {"if": TEXT}]}, "anyOf[1].if"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "strin"}, "type"),
        ({"type": []}, "type"),
        ({"type": "string", "format": "regex"}, "format"),
        ({"minLength": -1}, "minLength"),
        ({"minLength": 1.5}, "minLength"),
        ({"maxItems": 2**40}, "maxItems"),
        ({"minimum": "1"}, "minimum"),
        ({"minimum": 1e300}, "minimum"),
        ({"multipleOf": 0}, "multipleOf"),
        ({"multipleOf": 999_983}, "multipleOf"),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "allOf[1].multipleOf"),
        ({"multipleOf": 1e-9, "minimum": 1, "allOf": [{"multipleOf": 1}]}, "allOf[0].multipleOf"),
        ({"pattern": "a" * 600}, "pattern"),
        ({"enum": []}, "enum"),
        ({"enum": ["a\x00"]}, "enum"),
        ({"properties": {"\x01": TEXT}}, "properties"),
        ({"properties": []}, "properties"),
        ({"anyOf": []}, "anyOf"),
        ({"items": [TEXT]}, "items"),
        ({"required": "a"}, "required"),
        ({"$ref": "https://example.com/s.json"}, "$ref"),
        ({"$ref": "#/$defs/none"}, "$ref"),
        ({"$ref": "#/properties", "properties": {"a": TEXT}}, "$ref"),
        ({"$ref": 1}, "$ref"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"properties": {f"p{i}": TEXT for i in range(MAX_PROPERTIES + 1)}}, "properties"),
        ([], ""),
        ("string", ""),
        (None, ""),
    ],
)
def test_the_place_at_fault_is_named(schema: Any, path: str) -> None:
    with pytest.raises(SchemaError) as refused:
        checked_schema(schema)

    assert refused.value.path == path


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"$ref": "#"}, ""),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            },
            "",
        ),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, ""),
        ({"properties": {"a": {"$ref": "#/properties/a"}}}, "properties.a"),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, ""),
        ({"anyOf": [{"$ref": "#"}]}, ""),
        ({"allOf": [TEXT, {"$ref": "#"}]}, ""),
    ],
)
def test_what_has_no_finite_value_is_refused(schema: Any, path: str) -> None:
    with pytest.raises(SchemaError, match="no finite value") as refused:
        checked_schema(schema)

    assert refused.value.path == path


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"n": {"$ref": "#"}}},
        {
            "type": "object",
            "properties": {"n": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
            "required": ["n"],
        },
        {"type": "array", "items": {"$ref": "#"}},
        {"anyOf": [TEXT, {"$ref": "#"}]},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": TEXT}},
        {"$ref": "#/$defs/%C3%A9", "$defs": {"é": TEXT}},
        nested(MAX_DEPTH),
        chain(400),
    ],
)
def test_what_refers_to_itself_and_ends_is_taken(schema: Any) -> None:
    assert checked_schema(schema) == schema


@pytest.mark.parametrize(
    "schema",
    [
        nested(MAX_DEPTH + 1),
        nested(5_000),
        {"anyOf": [TEXT] * MAX_SCHEMAS},
        {
            "$defs": {
                f"d{i}": {"properties": {f"p{j}": TEXT for j in range(200)}} for i in range(200)
            }
        },
    ],
)
def test_what_is_too_large_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError, match="more than"):
        checked_schema(schema)


@pytest.mark.parametrize(
    ("document", "path"),
    [
        ([], "response_format"),
        ({}, "response_format.type"),
        ({"type": ["text"]}, "response_format.type"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {}}, "response_format.json_schema.schema"),
        (
            {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}},
            "response_format.json_schema.strict",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"not": {}}}},
            "response_format.json_schema.schema.not",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"enum": ["\ud800"]}}},
            "response_format.json_schema.schema",
        ),
        (
            {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}},
            "response_format.json_schema.schema",
        ),
        ({"type": "tool_calls", "functions": []}, "response_format.functions"),
        (
            {"type": "tool_calls", "functions": [{"name": "a b"}]},
            "response_format.functions[0].name",
        ),
        ({"type": "tool_calls", "functions": [{"name": "f"}] * 2}, "response_format.functions"),
        (
            {"type": "tool_calls", "functions": [{"name": "f", "parameters": {"type": "string"}}]},
            "response_format.functions[0].parameters.type",
        ),
    ],
)
def test_formats_name_their_field(document: Any, path: str) -> None:
    with pytest.raises(FormatError) as refused:
        read_response_format(document)

    assert refused.value.path == path


def doubling(levels: int) -> dict[str, Any]:
    """Each level joins the one before twice."""
    schemas: dict[str, Any] = {"d0": {"type": "object"}}
    for i in range(1, levels):
        below = {"$ref": f"#/$defs/d{i - 1}"}
        joined = {name: {"allOf": [below, {"properties": {name: TEXT}}]} for name in "lr"}
        schemas[f"d{i}"] = {"type": "object", "properties": joined}
    return {"$ref": f"#/$defs/d{levels - 1}", "$defs": schemas}


@pytest.mark.parametrize(
    "schema",
    [
        doubling(30),
        {"$ref": "#/$defs/a", "minLength": 1, "$defs": {"a": doubling(3), **doubling(25)["$defs"]}},
        {"properties": {"n": {"allOf": [{"$ref": "#"}, {"properties": {"a": TEXT}}]}}},
        {"patternProperties": {f"^{i}$": TEXT for i in range(33)}},
        {"enum": [str(i) for i in range(1001)]},
        {"enum": [str(i) for i in range(101)], "pattern": "1"},
        {"allOf": [{"enum": [str(i) for i in range(101)]}, {"pattern": "1"}]},
    ],
)
def test_what_would_take_seconds_to_compile_is_refused(schema: Any) -> None:
    with pytest.raises(SchemaError):
        checked_schema(schema)


def test_what_is_joined_once_is_taken() -> None:
    base = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
    schema = {"$defs": {"base": base}, "allOf": [{"$ref": "#/$defs/base"}, {"required": ["a"]}]}

    assert checked_schema(schema) == schema
    assert checked_schema(doubling(5)) == doubling(5)
    alone = {"description": "d", "allOf": [{"$ref": "#/$defs/base"}], "$defs": {"base": base}}
    assert checked_schema(alone) == {"$ref": "#/$defs/base", "$defs": {"base": base}}


@pytest.mark.parametrize(
    "document",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": nested(3)}},
        {
            "type": "tool_calls",
            "functions": [{"name": "f"}, {"name": "g", "parameters": {}}],
            "parallel": True,
        },
    ],
)
def test_a_format_is_the_same_after_its_document(document: Any) -> None:
    wanted = read_response_format(document)

    assert wanted is not None
    assert read_response_format(wanted.document()) == wanted


def test_a_function_without_parameters_takes_none() -> None:
    function = read_function("f", None, "tools[0].function")

    assert function.parameters == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
