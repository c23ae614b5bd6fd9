"""Which regular expressions of foreign tokenizers are run at all. Pure.

The engine behind them backtracks: some expressions take longer than the universe for a line of
text, and every prompt is matched. Taken is what published tokenizers need, and what costs at most a
low power of a text's length: no repeat within a repeat, no reference back, few repeats in a row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PATTERN_CHARS = 4096
MAX_DEPTH = 8
MAX_REPEATS = 2  # in one alternative; with four, 200 characters took 16 s
MAX_COUNT = 1024

_QUANTIFIER = re.compile(r"[*+?]|\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\((?:\?(?:[imsx-]*:|=|!|>|<=|<!|<\w+>|[imsx-]+(?=\))))?")
_ESCAPE = re.compile(r"\\(?:[pPx]\{[^}]{0,64}\}|.)", re.DOTALL)


def check_pattern(pattern: str) -> None:
    """Raise `ValueError` that tells why an expression is not run."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"it has {len(pattern)} characters (limit {MAX_PATTERN_CHARS})")
    reader = _Reader(pattern)
    reader.alternatives(0)
    if reader.at < len(pattern):
        raise ValueError(f"a bracket is closed at {reader.at} that was not opened")


@dataclass
class _Reader:
    """Walks over an expression; `at` is the next character.

    What is read is told as its repeats without end in a row, and how often its parts are copied by
    counts.
    """

    pattern: str
    at: int = 0

    def alternatives(self, depth: int) -> tuple[int, int]:
        """Read up to the end of the group; the most of its alternatives."""
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        most, copies, repeats = 0, 1, 0
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.pattern[self.at] == "|":
                self.at, repeats = self.at + 1, 0
                continue
            more, count = self._repeats(*self._atom(depth))
            repeats += more
            most, copies = max(most, repeats), max(copies, count)
            if most > MAX_REPEATS:
                raise ValueError(f"more than {MAX_REPEATS} repeats follow each other")
        return most, copies

    def _atom(self, depth: int) -> tuple[int, int]:
        char = self.pattern[self.at]
        if char == "(":
            return self._group(depth)
        if char == "[":
            self._char_class(0)
        elif char == "\\":
            self._escape()
        else:
            self.at += 1
        return 0, 1

    def _repeats(self, inner: int, copies: int) -> tuple[int, int]:
        """Read the quantifiers of what was read."""
        total = inner
        while match := _QUANTIFIER.match(self.pattern, self.at):
            self.at = match.end()
            low, comma, high = match[1], match[2], match[3]
            count = max((int(n[:9]) for n in (low, high) if n), default=0)
            copies *= max(count, 1)
            if copies > MAX_COUNT:
                raise ValueError(f"it counts to more than {MAX_COUNT}")
            if match[0] == "?" or (high and count <= 1) or (low and not comma and count <= 1):
                continue  # at most once; or a sign of the quantifier before
            if inner:
                raise ValueError("a repeat is within a repeat")
            if match[0] in "*+" or (comma and not high):
                total = 1
        return total, copies

    def _group(self, depth: int) -> tuple[int, int]:
        match = _GROUP.match(self.pattern, self.at)
        assert match is not None  # it begins with a bracket
        self.at = match.end()
        if match[0] == "(" and self.pattern[self.at : self.at + 1] in ("?", "*"):
            raise ValueError(f"the kind of group at {match.start()} is not supported")
        inner = self.alternatives(depth + 1)
        if self.pattern[self.at : self.at + 1] != ")":
            raise ValueError("a bracket is not closed")
        self.at += 1
        return inner

    def _char_class(self, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        self.at += 1
        if self.pattern[self.at : self.at + 1] == "^":
            self.at += 1
        first = True
        while self.at < len(self.pattern):
            char = self.pattern[self.at]
            if char == "]" and not first:
                self.at += 1
                return
            first = False
            if char == "[":
                self._char_class(depth + 1)
            elif char == "\\":
                self._escape()
            else:
                self.at += 1
        raise ValueError("a class of characters is not closed")

    def _escape(self) -> None:
        match = _ESCAPE.match(self.pattern, self.at)
        if match is None:
            raise ValueError("it ends with a backslash")
        if match[0][1] in "123456789kgK":
            raise ValueError(f"{match[0]} is not supported")
        self.at = match.end()
