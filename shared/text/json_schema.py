"""Decides which JSON schemas are taken, and says where one is not. Knows no grammar and no token.

What is refused here is refused by name: keywords without an effect on the grammar, and sizes that
would take seconds or many MB to compile or to walk.
Longer than other modules: each keyword is one small rule, and they call each other.
Keywords: https://json-schema.org/draft/2020-12/json-schema-validation
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from shared.errors import RequestError

MAX_DEPTH = 32
MAX_SCHEMAS = 1000  # subschemas in all
MAX_PROPERTIES = 256  # of one object; a row of the parser grows with those that may come next
MAX_PATTERN_CHARS = 512
# Each is held against each other, and each value against what stands beside it: half a ms a pair.
MAX_PATTERN_PROPERTIES = 32
MAX_ENUM = 1000  # values in all
MAX_ENUM_BESIDE_PATTERN = 100
# What `allOf` joins is written out, references and all; without a bound it may double at each.
MAX_JOINED = 4000
MAX_JOIN_DEPTH = 100
MAX_COUNT = 1 << 20
# States of the automaton that counts a multiple: 1,000,000 took 5 s and 200 MB.
MAX_MULTIPLE = 10_000

FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri".split()  # noqa: SIM905
)
TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_SCALARS = TYPES - {"object", "array"}

# These say nothing about what is valid. `discriminator` is OpenAPI's, beside `oneOf`.
_NOTES = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "discriminator",
        "$schema",
        "$id",
        "$comment",
    }
)
_DEFINITIONS = ("$defs", "definitions")
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")

_CONTROL = re.compile("[\\x00-\\x07\\x0b\\x0e-\\x1f]")

Schema = dict[str, Any] | bool


class SchemaError(RequestError):
    """A schema that is not taken; `path` is the place in it, "" the whole."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path or 'the schema'} {reason}")
        self.path = path
        self.reason = reason


def checked_schema(schema: Any) -> Schema:
    """The schema without its notes: equal answers, and nothing in it that the grammar passes over.

    Raises `SchemaError` for keywords that are not supported, for sizes over the limits above, for
    references that lead nowhere, and for what no finite answer satisfies.
    """
    walk = _Walk()
    checked = walk.schema(schema, "", "#", 0)
    for pointer, path in walk.references:
        if pointer not in walk.schemas:
            raise SchemaError(path, f"{pointer!r:.100} is no schema in this document")
    walk.check_counts()
    _check_finite(walk)
    _check_joins(walk)
    return checked


class _Walk:
    """One pass over a document. `schemas` are those that were seen, by JSON pointer."""

    def __init__(self) -> None:
        self.schemas: dict[str, Schema] = {}
        self.paths: dict[str, str] = {}
        self.references: list[tuple[str, str]] = []
        self.inner: dict[str, list[str]] = {}  # the schemas within each, but for definitions
        self._num_schemas = 0
        self._num_enum = 0
        self._num_pattern_properties = 0
        self._has_patterns = False
        self._multiples: list[tuple[Decimal, str]] = []

    def schema(self, value: Any, path: str, pointer: str, depth: int) -> Schema:
        if depth > MAX_DEPTH:
            raise SchemaError(path, f"is nested more than {MAX_DEPTH} deep")
        self._num_schemas += 1
        if self._num_schemas > MAX_SCHEMAS:
            raise SchemaError("", f"holds more than {MAX_SCHEMAS} schemas")
        self.paths[pointer] = path
        if isinstance(value, bool):
            self.schemas[pointer] = value
            return value
        if not isinstance(value, dict):
            raise SchemaError(path, "must be an object or a boolean")
        value = _only_part(value)
        checked: dict[str, Any] = {}
        self.schemas[pointer] = checked
        self.inner[pointer] = []
        for name, part in value.items():
            where = f"{path}.{name}" if path else str(name)
            at = f"{pointer}/{name}"
            if name in _NOTES:
                continue
            if name in _MAPS:
                checked[name] = self._map(part, where, at, depth, bounded=name == "properties")
                self._num_pattern_properties += len(part) * (name == "patternProperties")
                if name in ("properties", "patternProperties"):
                    self.inner[pointer] += [f"{at}/{key}" for key in part]
            elif name in _LISTS:
                checked[name] = self._list(part, where, at, depth)
                self.inner[pointer] += [f"{at}/{i}" for i in range(len(part))]
            elif name in _SINGLE:
                checked[name] = self.schema(part, where, at, depth + 1)
                self.inner[pointer].append(at)
            elif name in _VALUES:
                _VALUES[name](part, where)
                if _has_controls(part):
                    raise SchemaError(where, "holds a control character")
                checked[name] = part
                if name == "$ref":
                    self.references.append((_pointer(part), where))
                elif name == "enum":
                    self._num_enum += len(part)
                elif name in ("pattern", "format"):
                    self._has_patterns = True
                elif name == "multipleOf":
                    self._multiples.append((Decimal(str(part)), where))
            else:
                raise SchemaError(where[:200], "is not supported")
        if checked.get("minProperties", 0) > max(1, len(checked.get("required", ()))):
            # Keys that no property names may come twice, and then count once.
            raise SchemaError(f"{path}.minProperties".lstrip("."), "over 1 is not supported")
        num_values = len(checked.get("enum", ()))
        if num_values > MAX_ENUM_BESIDE_PATTERN and ("pattern" in checked or "format" in checked):
            raise SchemaError(
                f"{path}.enum".lstrip("."),
                f"holds more than {MAX_ENUM_BESIDE_PATTERN} values beside a pattern",
            )
        return checked

    def _map(
        self, value: Any, path: str, pointer: str, depth: int, *, bounded: bool
    ) -> dict[str, Schema]:
        if not isinstance(value, dict):
            raise SchemaError(path, "must be an object")
        if bounded and len(value) > MAX_PROPERTIES:
            raise SchemaError(path, f"holds more than {MAX_PROPERTIES} properties")
        if _has_controls(list(value)):
            raise SchemaError(path, "holds a control character")
        return {
            name: self.schema(part, f"{path}.{name}"[:200], f"{pointer}/{name}", depth + 1)
            for name, part in value.items()
        }

    def _list(self, value: Any, path: str, pointer: str, depth: int) -> list[Schema]:
        if not isinstance(value, list) or not value:
            raise SchemaError(path, "must be a list of schemas")
        return [
            self.schema(part, f"{path}[{i}]", f"{pointer}/{i}", depth + 1)
            for i, part in enumerate(value)
        ]

    def check_counts(self) -> None:
        """Of all together, since they may meet in one value: by `allOf`, or a reference."""
        if self._num_pattern_properties > MAX_PATTERN_PROPERTIES:
            raise SchemaError("", f"holds more than {MAX_PATTERN_PROPERTIES} patternProperties")
        joins = self._has_patterns and any(map(_is_join, self.schemas.values()))
        most = MAX_ENUM_BESIDE_PATTERN if joins else MAX_ENUM
        if self._num_enum > most:
            reason = f"holds more than {most} values of enum"
            raise SchemaError("", f"{reason} beside patterns and allOf" if joins else reason)
        digits = max((_decimals(step) for step, _ in self._multiples), default=0)
        common = 1
        for step, path in self._multiples:
            common = math.lcm(common, int(step.scaleb(digits)))
            if common > MAX_MULTIPLE:
                raise SchemaError(
                    path, f"is too large: what all multipleOf have in common is over {MAX_MULTIPLE}"
                )


def _check_finite(walk: _Walk) -> None:
    """Refuse what refers to itself without an end: the answer would go on for ever, or could not
    begin. The least fixed point of "has a finite value"."""
    finite: set[str] = set()
    open_ones = list(reversed(walk.schemas))  # what is inside first: mostly one round is enough
    grows = True
    while grows:
        num_before = len(open_ones)
        for pointer in open_ones:
            if _is_finite(walk.schemas[pointer], pointer, finite):
                finite.add(pointer)
        open_ones = [pointer for pointer in open_ones if pointer not in finite]
        grows = len(open_ones) < num_before
    for pointer, path in walk.paths.items():
        if pointer not in finite:
            raise SchemaError(path, "has no finite value: it refers to itself without an end")


def _check_joins(walk: _Walk) -> None:
    """Refuse what grows beyond bounds where `allOf`, or a reference with more beside it, is joined
    to one schema."""
    sizes: dict[str, int] = {}
    total = 0
    for pointer, schema in walk.schemas.items():
        if _is_join(schema):
            total += _joined_size(walk, pointer, sizes, set())
            if total > MAX_JOINED:
                raise SchemaError(
                    walk.paths[pointer], f"joins more than {MAX_JOINED} schemas by allOf"
                )


def _joined_size(walk: _Walk, pointer: str, sizes: dict[str, int], within: set[str]) -> int:
    """How many schemas are written out for one, saturated."""
    if pointer in sizes:
        return sizes[pointer]
    if pointer in within:
        raise SchemaError(walk.paths[pointer], "refers to itself within allOf")
    if len(within) > MAX_JOIN_DEPTH:
        raise SchemaError(walk.paths[pointer], f"is joined over more than {MAX_JOIN_DEPTH} levels")
    schema = walk.schemas[pointer]
    size = 1
    if isinstance(schema, dict):
        parts = list(walk.inner[pointer])
        if "$ref" in schema:
            parts.append(_pointer(schema["$ref"]))
        within.add(pointer)
        for part in parts:
            size = min(size + _joined_size(walk, part, sizes, within), MAX_JOINED + 1)
        within.remove(pointer)
    sizes[pointer] = size
    return size


def _is_join(schema: Schema) -> bool:
    if isinstance(schema, bool):
        return False
    return "allOf" in schema or ("$ref" in schema and bool(set(schema) - {"$ref", *_DEFINITIONS}))


def _only_part(schema: dict[str, Any]) -> dict[str, Any]:
    """`allOf` of one schema, with notes beside it at most, is that schema."""
    parts = schema.get("allOf")
    if not (isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict)):
        return schema
    rest = {name: part for name, part in schema.items() if name not in ("allOf", *_NOTES)}
    if set(rest) - set(_DEFINITIONS) or set(parts[0]) & set(_DEFINITIONS):
        return schema
    return {**rest, **parts[0]}


def _is_finite(schema: Schema, pointer: str, finite: set[str]) -> bool:
    if isinstance(schema, bool) or "enum" in schema or "const" in schema:
        return True
    if "$ref" in schema and _pointer(schema["$ref"]) not in finite:
        return False
    for name in ("anyOf", "oneOf"):
        if name in schema and not any(p in finite for p in _parts(schema, name, pointer)):
            return False
    if any(part not in finite for part in _parts(schema, "allOf", pointer)):
        return False
    kinds = _types(schema)
    if kinds & _SCALARS:
        return True
    return ("object" in kinds and _is_finite_object(schema, pointer, finite)) or (
        "array" in kinds and _is_finite_array(schema, pointer, finite)
    )


def _is_finite_object(schema: Mapping[str, Any], pointer: str, finite: set[str]) -> bool:
    named = schema.get("properties", {})
    for name in schema.get("required", ()):
        part = f"{pointer}/properties/{name}" if name in named else ""
        part = part or (f"{pointer}/additionalProperties" * ("additionalProperties" in schema))
        if part and part not in finite:
            return False
    return True


def _is_finite_array(schema: Mapping[str, Any], pointer: str, finite: set[str]) -> bool:
    least = schema.get("minItems", 0)
    first = list(_parts(schema, "prefixItems", pointer))
    needed = first[:least]
    if least > len(first) and "items" in schema:
        needed.append(f"{pointer}/items")
    return all(part in finite for part in needed)


def _parts(schema: Mapping[str, Any], name: str, pointer: str) -> Iterator[str]:
    return (f"{pointer}/{name}/{i}" for i in range(len(schema.get(name, ()))))


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    kinds = schema.get("type", TYPES)
    return frozenset({kinds} if isinstance(kinds, str) else kinds)


def _pointer(reference: str) -> str:
    """As this module writes pointers: names as they are."""
    return unquote(reference).replace("~1", "/").replace("~0", "~").rstrip("/") or "#"


def _decimals(step: Decimal) -> int:
    exponent = step.normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def _check(is_right: Callable[[Any], bool], expected: str) -> Callable[[Any, str], None]:
    def check(value: Any, path: str) -> None:
        if not is_right(value):
            raise SchemaError(path, f"must be {expected}, got {value!r:.60}")

    return check


def _has_controls(value: Any) -> bool:
    """Whether a text in it can only be written with \\u, which answers do without."""
    match value:
        case str():
            return _CONTROL.search(value) is not None
        case list():
            return any(_has_controls(part) for part in value)
        case dict():
            return any(_has_controls(name) or _has_controls(part) for name, part in value.items())
        case _:
            return False


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and abs(value) < 1e15


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_type(value: Any) -> bool:
    kinds = [value] if isinstance(value, str) else value
    return _is_texts(kinds) and bool(kinds) and TYPES.issuperset(kinds)


_is_count = _check(
    lambda v: type(v) is int and 0 <= v <= MAX_COUNT, f"an integer in 0..{MAX_COUNT}"
)
_is_limit = _check(_is_number, "a number below 1e15")
# Keywords with a value that is no schema.
_VALUES: dict[str, Callable[[Any, str], None]] = {
    "$ref": _check(
        lambda v: isinstance(v, str) and (v == "#" or v.startswith("#/")),
        "a reference within this document, #/…",
    ),
    "type": _check(_is_type, f"of {', '.join(sorted(TYPES))}"),
    "enum": _check(lambda v: isinstance(v, list) and bool(v), "a list of at least one value"),
    "const": _check(lambda v: True, "a value"),
    "required": _check(_is_texts, "a list of names"),
    "minProperties": _is_count,
    "maxProperties": _is_count,
    "minItems": _is_count,
    "maxItems": _is_count,
    "minLength": _is_count,
    "maxLength": _is_count,
    "pattern": _check(
        lambda v: isinstance(v, str) and len(v) <= MAX_PATTERN_CHARS,
        f"a regular expression of at most {MAX_PATTERN_CHARS} characters",
    ),
    "format": _check(
        lambda v: isinstance(v, str) and v in FORMATS, f"one of {', '.join(sorted(FORMATS))}"
    ),
    "minimum": _is_limit,
    "maximum": _is_limit,
    "exclusiveMinimum": _is_limit,
    "exclusiveMaximum": _is_limit,
    "multipleOf": _check(lambda v: _is_number(v) and v > 0, "a number over 0"),
}
