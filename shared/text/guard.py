"""Keeps names of control tokens in what users write from becoming such tokens. Pure.

A template mixes its own control tokens with users' texts into one text. So that it can be told
which are whose, a mark is put into each name that a user wrote before the template sees it; where
the mark stands afterwards is text. A conversation without such names is not touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from shared.errors import RequestError

# Characters that Unicode promises never to give a meaning.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class Guard:
    """`names` are the texts of control tokens, of at least two characters each."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted((re.escape(name) for name in names if len(name) > 1), key=len)
        longest_first = "|".join(reversed(ordered)) or r"(?!)"
        self._name = re.compile(longest_first)
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
        for match in self._name.finditer(text):
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
