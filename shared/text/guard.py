"""Keeps names of control tokens in what users write from becoming such tokens. Pure.

A template mixes its own control tokens with users' texts into one text. So that it can be told
which are whose, a mark is put into each name that a user wrote before the template sees it; where
the mark stands afterwards is text. A conversation without such names is not touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shared.errors import RequestError

# Characters that Unicode promises never to give a meaning.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


# Unicode's White_Space, which is not quite Python's
_SPACES = r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*"


@dataclass(frozen=True, slots=True)
class ControlName:
    """The text of a control token, and whether it takes the white space left and right of it."""

    text: str
    left: bool = False
    right: bool = False

    def pattern(self) -> str:
        left, right = (_SPACES if takes else "" for takes in (self.left, self.right))
        return f"{left}{re.escape(self.text)}{right}"


class Guard:
    """`names` are those of control tokens; of less than two characters there can be none."""

    def __init__(self, names: Iterable[ControlName]) -> None:
        ordered = sorted((n for n in names if len(n.text) > 1), key=lambda n: len(n.text))[::-1]
        longest_first = "|".join(re.escape(name.text) for name in ordered) or r"(?!)"
        self._name = re.compile(longest_first)
        self._whole_name = re.compile("|".join(name.pattern() for name in ordered) or r"(?!)")
        self._first_char = re.compile(f"(?=(?:{longest_first}))(.)", re.DOTALL)

    def finds_any(self, value: Any) -> bool:
        """Whether there is a name in a text, or in a text of these maps and lists."""
        return any(self._name.search(text) for text in _texts(value))

    def free_mark(self, value: Any) -> str:
        """A character that is in none of the texts. Raises `RequestError` if there is none."""
        for mark in _MARKS:
            if not any(mark in text for text in _texts(value)):
                return mark
        raise RequestError("the messages hold every character that Unicode leaves without meaning")

    def marked(self, value: Any, mark: str) -> Any:
        """The value with the mark inside of every name."""
        return _mapped(value, lambda text: self._first_char.sub(rf"\1{mark}", text))

    def pieces(self, text: str, mark: str) -> Iterator[tuple[str, bool]]:
        """What a template made of marked texts: (piece, whether it is a control token)."""
        start = 0
        for match in self._whole_name.finditer(text):
            if match.start() > start:
                yield text[start : match.start()].replace(mark, ""), False
            yield match[0], True
            start = match.end()
        if start < len(text):
            yield text[start:].replace(mark, ""), False


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(name)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(name, change): _mapped(part, change) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(part, change) for part in value]
    return value
