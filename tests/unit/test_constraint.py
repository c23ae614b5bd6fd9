"""Answers that follow a mask parse and validate, whatever is drawn."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shared.errors import RequestError
from shared.text.constraint import (
    MAX_GRAMMARS,
    Constraint,
    GrammarError,
    Grammars,
    check_grammar,
)
from shared.text.response_format import (
    FormatError,
    ResponseFormat,
    calls_format,
    json_format,
    read_function,
    read_response_format,
)
from shared.text.token_bytes import TokenTable, token_table
from shared.text.tool_calls import ForcedCalls
from tests.gguf_files import SPECIAL_TOKENS, tiny_tokens

END = SPECIAL_TOKENS.index("<|im_end|>")
WORDS = [
    '{"',
    '":',
    '": ',
    '",',
    '"}',
    "}}",
    "},",
    " [",
    '["',
    '"]',
    "tru",
    "é",
    "中文",
    "1.",
    "\n  ",
]
TABLE = token_table(
    {text: i for i, text in enumerate(tiny_tokens())},
    [{"id": i, "content": text, "special": True} for i, text in enumerate(SPECIAL_TOKENS)],
)
TABLE = TokenTable(TABLE.tokens + [word.encode() for word in WORDS], TABLE.special_ids)
GRAMMARS = Grammars(lambda: TABLE, [END])
MAX_STEPS = 3_000


def walk(constraint: Constraint, rng: random.Random, max_steps: int = MAX_STEPS) -> list[int]:
    """Tokens drawn from what is allowed, with a leaning to come to an end."""
    taken: list[int] = []
    while len(taken) < max_steps:
        allowed = np.flatnonzero(constraint.allowed())
        closing = [i for i in allowed if TABLE.tokens[i][:1] in (b'"', b"}", b"]", b",")]
        if END in allowed and rng.random() < 0.7:
            break
        token_id = int(rng.choice(closing if closing and rng.random() < 0.5 else list(allowed)))
        if token_id == END:
            break
        constraint.advance(token_id)
        taken.append(token_id)
    return taken


def text_of(taken: list[int]) -> str:
    return b"".join(TABLE.tokens[i] for i in taken).decode()


def read_json(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def schema_format(schema: Any) -> ResponseFormat:
    return json_format(schema, "schema")


NAMES = st.sampled_from(["a", "b", "name", "ключ", 'q"', "x y", "a/b", "$ref"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def ranges(low: str, high: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """None, one or both of two limits, in order."""
    return st.tuples(values, values, st.integers(0, 3)).map(
        lambda t: {
            **({low: min(t[0], t[1])} if t[2] & 1 else {}),
            **({high: max(t[0], t[1])} if t[2] & 2 else {}),
        }
    )


def with_type(kind: str, *parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(*parts).map(
        lambda found: {"type": kind, **{k: v for p in found for k, v in p.items()}}
    )


LEAVES = st.one_of(
    with_type("string", ranges("minLength", "maxLength", st.integers(0, 12))),
    with_type(
        "string",
        st.sampled_from(["^[a-z]{2,4}$", "x+", "^(é|中)", "[0-9]-[0-9]"]).map(
            lambda p: {"pattern": p}
        ),
    ),
    with_type(
        "string", st.sampled_from(["date", "uuid", "ipv4", "email"]).map(lambda f: {"format": f})
    ),
    with_type("integer", ranges("minimum", "maximum", st.integers(-500, 5_000))),
    with_type(
        "integer",
        ranges("exclusiveMinimum", "maximum", st.integers(-50, 60)),
        st.just({"multipleOf": 7}),
    ),
    with_type(
        "number",
        ranges("minimum", "exclusiveMaximum", st.floats(-1e6, 1e6).map(lambda x: round(x, 3))),
    ),
    st.sampled_from(
        [{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, True, {}]
    ),
    JSON_VALUES.map(lambda value: {"const": value}),
    st.lists(JSON_VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
)


@st.composite
def objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(NAMES, inner, max_size=4))
    required = (
        draw(st.lists(st.sampled_from(sorted(properties)), unique=True)) if properties else []
    )
    schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    more = draw(st.sampled_from(["none", "any", "typed"]))
    if more != "any":
        schema["additionalProperties"] = False if more == "none" else draw(inner)
    return schema


@st.composite
def arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    return {
        "type": "array",
        "items": draw(inner),
        **draw(ranges("minItems", "maxItems", st.integers(0, 4))),
    }


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts}),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda parts: {
                "type": "array",
                "prefixItems": parts,
                "items": False,
                "minItems": len(parts),
            }
        ),
    ),
    max_leaves=8,
)


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_whatever_is_drawn_validates(schema: Any, seed: int) -> None:
    wanted = _taken(schema)
    assume(wanted is not None)
    assert wanted is not None
    rng = random.Random(seed)

    for _ in range(3):
        taken = walk(GRAMMARS.begin(wanted), rng)
        if len(taken) == MAX_STEPS:
            continue  # cut: as by max_tokens
        jsonschema.Draft202012Validator(schema).validate(read_json(text_of(taken)))


def _taken(schema: Any) -> ResponseFormat | None:
    try:
        wanted = schema_format(schema)
        check_grammar(wanted)
    except RequestError:
        return None
    return wanted


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=20)
def test_a_schema_may_refer_to_itself(seed: int) -> None:
    taken = walk(GRAMMARS.begin(schema_format(TREE)), random.Random(seed))

    assume(len(taken) < MAX_STEPS)
    jsonschema.Draft202012Validator(TREE).validate(read_json(text_of(taken)))


@given(seed=st.integers(0, 2**32), cut=st.integers(0, 200))
@settings(deadline=None, max_examples=40)
def test_the_state_is_a_function_of_the_tokens(seed: int, cut: int) -> None:
    wanted = schema_format(TREE)
    first = GRAMMARS.begin(wanted)
    taken = walk(first, random.Random(seed), max_steps=cut)

    other = Grammars(lambda: TABLE, [END]).begin(wanted)
    for token_id in taken:
        other.advance(token_id)

    assert np.array_equal(other.allowed(), first.allowed())


@pytest.mark.parametrize("parallel", [False, True])
@given(seed=st.integers(0, 2**32))
@settings(deadline=None, max_examples=30)
def test_forced_calls_are_calls_whose_arguments_validate(parallel: bool, seed: int) -> None:
    schemas = {
        "get_weather": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 9},
                "days": {"$ref": "#/$defs/n"},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"n": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
        "stop": None,
    }
    functions = [read_function(name, schema, "f") for name, schema in schemas.items()]
    taken = walk(GRAMMARS.begin(calls_format(functions, parallel=parallel)), random.Random(seed))
    assume(len(taken) < MAX_STEPS)

    finder = ForcedCalls(schemas)
    parts = [
        part for token in taken for part in finder.feed(TABLE.tokens[token].decode("latin1"))[1]
    ]

    assert parts[0].name
    assert finder.num_calls == 1 or parallel
    for index in range(finder.num_calls):
        own = [part for part in parts if part.index == index]
        name = "".join(part.name for part in own)
        arguments = json.loads("".join(part.arguments for part in own).encode("latin1"))
        jsonschema.validate(arguments, schemas[name] or {"type": "object", "maxProperties": 0})


def test_a_complete_answer_can_only_end() -> None:
    constraint = GRAMMARS.begin(schema_format({"const": [1]}))
    for byte in b"[1]":
        constraint.advance(TABLE.tokens.index(bytes([byte])))

    assert np.flatnonzero(constraint.allowed()).tolist() == [END]
    constraint.advance(END)
    assert np.flatnonzero(constraint.allowed()).tolist() == [END]


def test_logits_of_what_may_not_come_are_forbidden() -> None:
    constraint = GRAMMARS.begin(schema_format({"enum": ["a", 7]}))
    logits = np.zeros(len(TABLE.tokens) + 5, np.float32)  # a vocabulary that was padded

    constraint.process(logits)

    assert {TABLE.tokens[i] for i in np.flatnonzero(np.isfinite(logits))} == {b'"', b"7"}


def test_a_token_that_may_not_come_is_an_error() -> None:
    constraint = GRAMMARS.begin(schema_format({"type": "integer"}))

    with pytest.raises(GrammarError):
        constraint.advance(TABLE.tokens.index(b"x"))


def test_blanks_are_bounded() -> None:
    constraint = GRAMMARS.begin(schema_format({"type": "object"}))
    constraint.advance(TABLE.tokens.index(b"{"))

    num_blanks = 0
    for blank in [b"\n", *[b" "] * 100]:
        if not constraint.allowed()[TABLE.tokens.index(blank)]:
            break
        constraint.advance(TABLE.tokens.index(blank))
        num_blanks += 1

    assert num_blanks < 40


def test_grammars_are_forgotten_and_made_again() -> None:
    grammars = Grammars(lambda: TABLE, [END])
    first = grammars.begin(schema_format({"const": 0}))

    for number in range(1, 3 * MAX_GRAMMARS):
        grammars.begin(schema_format({"const": number}))

    assert grammars.num_compiled == MAX_GRAMMARS
    again = grammars.begin(schema_format({"const": 0}))
    assert np.array_equal(again.allowed(), first.allowed())


def test_answers_of_one_grammar_do_not_disturb_each_other() -> None:
    wanted = schema_format({"type": "array", "items": {"type": "integer"}})
    left, right = GRAMMARS.begin(wanted), GRAMMARS.begin(wanted)
    before = right.allowed()

    left.advance(TABLE.tokens.index(b"["))

    assert np.array_equal(right.allowed(), before)
    assert not np.array_equal(left.allowed(), before)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(?=a)b"},
        {"type": "string", "pattern": "("},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(4)]} for i in range(8)
            ]
        },
    ],
)
def test_what_cannot_be_compiled_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        check_grammar(schema_format(schema))


def test_text_needs_no_grammar_and_unknown_types_are_named() -> None:
    assert read_response_format({"type": "text"}) is None
    with pytest.raises(FormatError) as refused:
        read_response_format({"type": "xml"})
    assert refused.value.path == "response_format.type"


def test_the_library_is_imported_by_the_first_that_asks() -> None:
    program = (
        "import sys, shared.codec, services.worker.worker, shared.text.constraint;"
        "sys.exit('llguidance' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
