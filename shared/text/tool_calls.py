"""Finds calls of functions in an answer that comes in pieces. Knows no token and no request.

A call is written between two tags, as Hermes and Qwen models do:
<tool_call>
{"name": "f", "arguments": {…}}
</tool_call>
What looks like one and is none stays text, tags and all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from shared.text.response_format import CALL_BEGIN, CALL_END, Function

MAX_FREE_CALLS = 128  # of one answer


@dataclass(frozen=True, slots=True)
class CallPart:
    """A piece of call number `index` of an answer; `name` is in its first piece alone."""

    index: int
    name: str
    arguments: str


class FreeCalls:
    """Text with calls in it, of a model that may write anything.

    A call is shown when it is complete, and text that may be the beginning of one, with the blanks
    before it, when it is known not to be. After `max_calls` nothing more is taken: `is_done`.
    """

    def __init__(self, names: Iterable[str], *, max_calls: int) -> None:
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._held = ""
        self._num_calls = 0
        self._end: _CallEnd | None = None  # of the call that `_held` begins with, blanks before it

    @property
    def num_calls(self) -> int:
        return self._num_calls

    @property
    def is_done(self) -> bool:
        return self._num_calls >= self._max_calls

    def feed(self, text: str) -> tuple[str, list[CallPart]]:
        """The text and the calls that may be shown now."""
        self._held += text
        shown, calls = "", []
        while not self.is_done:
            begin = self._held.find(CALL_BEGIN)
            if begin < 0:
                shown += self._cut(len(self._held) - _len_open(self._held))
                break
            if self._end is None:
                blanks = begin - len(self._held[:begin].rstrip())
                shown += self._cut(begin - blanks)
                begin = blanks
                self._end = _CallEnd(begin + len(CALL_BEGIN))
            end = self._end.find(self._held)
            if end < 0:
                break
            self._end = None
            call = _read_call(self._held[begin:end], self._names)
            if call is None:
                shown += self._cut(end)
                continue
            self._cut(end)
            calls.append(CallPart(self._num_calls, *call))
            self._num_calls += 1
        return shown, calls

    def finish(self) -> str:
        """What was held back: no call came of it."""
        rest = "" if self.is_done else self._held
        self._held = ""
        # Blanks after a call are no text.
        return rest if self._num_calls == 0 or rest.strip() else ""

    def _cut(self, length: int) -> str:
        cut, self._held = self._held[:length], self._held[length:]
        return cut


class ForcedCalls:
    """Calls that a grammar has written, one after the other and nothing else.

    Since they cannot turn out to be none, arguments are shown as they come; one that is cut off has
    the arguments that it came to.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._frames = [Function(name, "{}") for name in names]
        self._held = ""
        self._num_calls = 0
        self._within = False  # the arguments of a call
        self._depth = 0
        self._in_text = False
        self._escaped = False
        self.is_done = False

    @property
    def num_calls(self) -> int:
        return self._num_calls

    def feed(self, text: str) -> tuple[str, list[CallPart]]:
        """No text, and the parts of calls that are new."""
        self._held += text
        parts: list[CallPart] = []
        while self._held:
            if self._within:
                end = self._end_of_arguments()
                piece, self._held = self._held[:end], self._held[end:]
                parts.append(CallPart(self._num_calls - 1, "", piece))
                continue
            name, length = self._head()
            if not name:
                break
            self._held = self._held[length:]
            self._within = True
            parts.append(CallPart(self._num_calls, name, ""))
            self._num_calls += 1
        return "", joined_parts(parts)

    def finish(self) -> str:
        """Half of a frame is no text."""
        self._held = ""
        return ""

    def _head(self) -> tuple[str, int]:
        """The name whose call begins, and how long that beginning is with the end of the last."""
        for function in self._frames:
            head, tail = function.call_frame()
            if self._num_calls:
                head = f"{tail}\n{head}"
            if self._held.startswith(head):
                return function.name, len(head)
        return "", 0

    def _end_of_arguments(self) -> int:
        """Where the arguments end, an object; the end of what there is if they go on."""
        for i, char in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = self._in_text
            elif char == '"':
                self._in_text = not self._in_text
            elif not self._in_text and char in "{[":
                self._depth += 1
            elif not self._in_text and char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._within = False
                    return i + 1
        return len(self._held)


def joined_parts(parts: Sequence[CallPart]) -> list[CallPart]:
    """One part for each call."""
    whole: dict[int, CallPart] = {}
    for part in parts:
        old = whole.get(part.index, CallPart(part.index, "", ""))
        whole[part.index] = CallPart(
            part.index, old.name + part.name, old.arguments + part.arguments
        )
    return list(whole.values())


def _len_open(text: str) -> int:
    """How long the end of a text is that may begin a call, with the blanks before it."""
    length = next(
        n for n in range(min(len(CALL_BEGIN) - 1, len(text)), -1, -1)
        if n == 0 or text.endswith(CALL_BEGIN[:n])
    )  # fmt: skip
    return len(text) - len(text[: len(text) - length].rstrip())


class _CallEnd:
    """Finds the end tag that is in no JSON text, in a text that grows; looks at each once.

    A call whose quotes do not pair never ends, and is text at the end.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._in_text = False
        self._escaped = False

    def find(self, text: str) -> int:
        """After the tag; -1 as long as there is none."""
        for i in range(self._position, len(text)):
            self._position = i
            char = text[i]
            if self._escaped:
                self._escaped = False
            elif self._in_text:
                self._escaped = char == "\\"
                self._in_text = char != '"'
            elif char == '"':
                self._in_text = True
            elif char == "<":
                if text.startswith(CALL_END, i):
                    return i + len(CALL_END)
                if CALL_END.startswith(text[i:]):
                    return -1  # perhaps it begins here
        self._position = len(text)
        return -1


def _read_call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of a call with its tags; None if it is none."""
    body = text[len(CALL_BEGIN) : -len(CALL_END)].strip()
    try:
        call = json.loads(body, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or set(call) != {"name", "arguments"}:
        return None
    name, arguments = call["name"], call["arguments"]
    if not (isinstance(name, str) and name in names and isinstance(arguments, dict)):
        return None
    head, tail = (part.strip() for part in (f'{{"name": "{name}", "arguments": ', "}"))
    if body.startswith(head) and body.endswith(tail):
        written = body[len(head) : -len(tail)].strip()
        try:
            if json.loads(written) == arguments:
                return name, written  # as the model wrote it
        except ValueError:
            pass
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def arguments_of(text: str) -> Any:
    """The arguments of an earlier call as a template takes them: an object, or as they are."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
