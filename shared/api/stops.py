"""Finds stop strings in text that comes in pieces. Knows no token and no request.

Knuth, Morris & Pratt (1977): one state a stop string, so that the pieces' borders do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """The text state of one answer. The stop string that is complete first ends it.

    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text ends with
        self._held = ""
        self.has_stopped = False

    def feed(self, text: str) -> str:
        """What of the text so far may be shown now. Once it has stopped there is nothing more."""
        if not self._stops or self.has_stopped:
            return "" if self.has_stopped else text
        text = self._held + text
        for end in range(len(self._held), len(text)):
            length = self._step(text[end])
            if length:
                self.has_stopped = True
                self._held = ""
                return text[: end + 1 - length]
        shown = len(text) - max(self._matched)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back: no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str) -> int:
        """Take one character; the length of the longest stop string that ends with it, or 0."""
        complete = 0
        for number, stop in enumerate(self._stops):
            matched = self._matched[number]
            while matched and stop[matched] != char:
                matched = self._borders[number][matched - 1]
            matched += stop[matched] == char
            if matched == len(stop):
                complete = max(complete, matched)
                matched = 0
            self._matched[number] = matched
        return complete


def _borders(pattern: str) -> list[int]:
    """Length of the longest proper prefix of pattern[: i + 1] that is its suffix, for each i."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        length += pattern[i] == pattern[length]
        borders[i] = length
    return borders
