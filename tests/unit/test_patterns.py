"""Expressions of foreign tokenizers: those of published ones are run, the hostile are not."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text.patterns import check_pattern
from shared.text.pre_tokenizers import PRE_TOKENIZERS

PUBLISHED = [pattern for kind in PRE_TOKENIZERS.values() for pattern in kind.patterns] + [
    r"(?:\r?\n)+(?!\r?\n)",  # Laguna
    # cl100k_base of newer versions of tiktoken
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"\d{1,3}(?=(?:\d{3})*\b)",  # Command A
    " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",  # Bloom
    r"<sentinel:[0-9]+>",
    r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    r"\s{512}(?!\S)|\s{1,2}(?!\S)|\s{1}",
]


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_ones_are_run(pattern: str) -> None:
    check_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(a+)+", "within a repeat"),
        ("(?:a*)*", "within a repeat"),
        ("(?:(?:a|b+)c)*d", "within a repeat"),
        ("(a{2,})+", "within a repeat"),
        ("(a+){50}", "within a repeat"),
        ("((a+)?)+", "within a repeat"),
        ("(?=(a+)+b)", "within a repeat"),
        (r"x*y*z*", "more than 2 repeats"),
        (r"(?:x*y*)(?:z*|a)", "more than 2 repeats"),
        ("a{100000}", "more than 1024"),
        ("a{99999999999999999999}", "more than 1024"),
        ("a{100}{100}", "more than 1024"),
        ("(?:a{100}){100}", "more than 1024"),
        (r"(.)\1", "not supported"),
        (r"(?<a>.)\k<a>", "not supported"),
        (r"(?<a>x\g<a>?)", "not supported"),
        ("(?(1)a|b)", "not supported"),
        ("(?R)", "not supported"),
        ("(?~a)", "not supported"),
        ("(*FAIL)", "not supported"),
        ("(" * 20 + ")" * 20, "nested more than 8"),
        ("[" * 20 + "]" * 20, "nested more than 8"),
        ("(a", "not closed"),
        ("[a", "not closed"),
        ("[]", "not closed"),
        ("a)", "was not opened"),
        ("a\\", "ends with a backslash"),
        ("a" * 5000, "5000 characters"),
    ],
)
def test_hostile_ones_are_not(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_pattern(pattern)


@given(st.text(alphabet="ab()[]{}*+?|\\^$.,:!=<>1-&p", max_size=30))
def test_any_text_is_run_or_refused(pattern: str) -> None:
    with contextlib.suppress(ValueError):
        check_pattern(pattern)
