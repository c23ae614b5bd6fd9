"""Calls are found in an answer however it is cut into pieces, and nothing else is taken for one."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text.tool_calls import CallPart, ForcedCalls, FreeCalls, joined_parts

CALL = (
    '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call> \\" {", "b": 1.50}}\n</tool_call>'
)
ARGUMENTS = '{"a": "</tool_call> \\" {", "b": 1.50}'


def found(
    text: str, *, max_calls: int = 9, cuts: random.Random | None = None
) -> tuple[str, list[CallPart]]:
    finder = FreeCalls(["f", "g"], max_calls=max_calls)
    shown, calls = "", []
    while text:
        length = 1 if cuts is None else cuts.randint(1, 12)
        piece, text = text[:length], text[length:]
        more, parts = finder.feed(piece)
        shown, calls = shown + more, calls + parts
    return shown + finder.finish(), calls


@pytest.mark.parametrize(
    ("text", "shown", "arguments"),
    [
        ("hello  world \n", "hello  world \n", []),
        (CALL, "", [ARGUMENTS]),
        (f"Let me see.\n\n{CALL}", "Let me see.", [ARGUMENTS]),
        (f"{CALL}\n{CALL}", "", [ARGUMENTS, ARGUMENTS]),
        (f"{CALL} \n\n", "", [ARGUMENTS]),
        (f"{CALL}\nDone.", "\nDone.", [ARGUMENTS]),
        ('<tool_call>{"arguments": {"x":[1]}, "name": "g"}</tool_call>', "", ['{"x": [1]}']),
        ("a < b <tool", "a < b <tool", []),
        ("x  ", "x  ", []),
    ],
)
def test_calls_are_no_text(text: str, shown: str, arguments: list[str]) -> None:
    for seed in [None, *range(20)]:
        cuts = None if seed is None else random.Random(seed)
        assert found(text, cuts=cuts) == (
            shown,
            [CallPart(i, "g" if "x" in a else "f", a) for i, a in enumerate(arguments)],
        )


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>f()</tool_call>",
        '<tool_call>\n{"name": "h", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": []}\n</tool_call>',
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"x": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}, "more": 1}\n</tool_call>',
        "<tool_call>" + "[" * 2000 + "</tool_call>",
        CALL[:-1],
        CALL[:30],
        "one </tool_call> two",
    ],
)
def test_what_is_no_call_stays_text(text: str) -> None:
    assert found(f"see: {text} end") == (f"see: {text} end", [])


def test_a_call_after_what_is_none_is_found() -> None:
    assert found(f"<tool_call>x</tool_call> and {CALL}") == (
        "<tool_call>x</tool_call> and",
        [CallPart(0, "f", ARGUMENTS)],
    )


def test_after_the_last_call_nothing_is_taken() -> None:
    assert found(f"{CALL}\n{CALL} more", max_calls=1) == ("", [CallPart(0, "f", ARGUMENTS)])


@given(text=st.text(alphabet='<>/tol_ca"{}\\ \n', max_size=60), seed=st.integers(0, 99))
def test_text_without_calls_is_never_lost(text: str, seed: int) -> None:
    assert found(text, cuts=random.Random(seed)) == (text, [])


JSON_OBJECTS = st.dictionaries(
    st.text(max_size=6),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=5,
    ),
    max_size=3,
)


@given(
    calls=st.lists(st.tuples(st.sampled_from(["f", "g"]), JSON_OBJECTS), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_forced_calls_come_as_they_are_written(
    calls: list[tuple[str, dict[str, object]]], seed: int
) -> None:
    rng, finder = random.Random(seed), ForcedCalls(["f", "g"])
    text = "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )

    parts: list[CallPart] = []
    while text:
        length = rng.randint(1, 20)
        shown, more = finder.feed(text[:length])
        parts, text = parts + more, text[length:]
        assert shown == ""

    whole = joined_parts(parts)
    assert [(part.name, json.loads(part.arguments)) for part in whole] == calls
    assert finder.finish() == ""


def test_a_forced_call_that_is_cut_has_what_came() -> None:
    finder = ForcedCalls(["f"])

    _, parts = finder.feed(CALL[:50])

    assert joined_parts(parts)[0].arguments == ARGUMENTS[: len(joined_parts(parts)[0].arguments)]
    assert finder.num_calls == 1
