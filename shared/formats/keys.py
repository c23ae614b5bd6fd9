"""Typed look-up in what a model file says of itself. Knows no key by name.

The values come from untrusted files, so a type is checked wherever one is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from shared.errors import ModelError

FILE_REMEDY = "give a model file that cellpipe can run"
T = TypeVar("T", int, float, str, bool)


@dataclass(frozen=True, slots=True)
class Keys:
    """The values of a file. `source` is its name and `word` what it calls a key, for messages;
    `prefix` goes before every key."""

    source: str
    word: str
    values: Mapping[str, Any]
    prefix: str = ""
    whole_floats: bool = False  # whether a number without a point is a float too, as in JSON

    def required(self, key: str, kind: type[T]) -> T:
        """Raises `ModelError` when the key is missing or of another type."""
        value = self.optional(key, kind)
        if value is None:
            raise self.bad(f"{self.word} {self.prefix}{key} is missing")
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """None when the key is missing or null. Raises `ModelError` for another type."""
        value = self.values.get(self.prefix + key)
        if kind is float and self.whole_floats and type(value) is int and abs(value) < 2**53:
            value = float(value)
        # type(), not isinstance: bool passes for int, and an array of per-layer sizes for neither.
        if value is not None and type(value) is not kind:
            raise self.bad(
                f"{self.word} {self.prefix}{key} must be {kind.__name__}, got {value!r:.60}"
            )
        return value

    def items(self, key: str, kind: type[T]) -> list[T] | None:
        """The list under a key, None when it is missing; `ModelError` unless all are of `kind`."""
        value = self.values.get(self.prefix + key)
        if value is None:
            return None
        if kind is float and self.whole_floats and isinstance(value, list):
            value = [float(v) if type(v) is int and abs(v) < 2**53 else v for v in value]
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise self.bad(f"{self.word} {self.prefix}{key} must be an array of {kind.__name__}")
        return value

    def inner(self, key: str) -> Keys | None:
        """The object under a key, None when it is missing; its keys as key.inner in messages."""
        value = self.values.get(self.prefix + key)
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self.bad(f"{self.word} {self.prefix}{key} must be an object, got {value!r:.60}")
        inner = {f"{key}.{name}": item for name, item in value.items()}
        return Keys(self.source, self.word, inner, f"{key}.", self.whole_floats)

    def bad(self, what: str) -> ModelError:
        """An error that names the file."""
        return ModelError(f"{self.source}: {what}", remedy=FILE_REMEDY)
