"""Reads TOML tables strictly: every error names file, field and value. Knows no spec."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shared.errors import ConfigError

MAX_WHOLE = 10**18
MAX_NUMBER = 1e18  # products of a few such numbers, and of their inverses, are finite yet


class Table:
    """One table of a file. Each field is taken once; `done` refuses what nobody asked for."""

    def __init__(self, values: Mapping[str, Any], file: str, path: str = "") -> None:
        self._values = dict(values)
        self._file = file
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def where(self, name: str) -> str:
        """A field as messages call it."""
        return f"{self._path}.{name}" if self._path else name

    def error(self, name: str, why: str, *, remedy: str = "") -> ConfigError:
        return ConfigError(f"{self._file}: {self.where(name)} {why}", remedy=remedy)

    def text(self, name: str, default: str | None = None) -> str:
        value = self._take(name, default)
        if not isinstance(value, str) or not value.strip():
            raise self.error(name, f"must be text, got {value!r:.80}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._take(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r:.80}")
        return value

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; 1e9 is one too, as people write bytes so."""
        value = self._take(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value != int(value):
            raise self.error(name, f"must be a whole number, got {value!r:.80}")
        if value < least:
            raise self.error(name, f"must be at least {least}, got {value!r:.80}")
        if value > MAX_WHOLE:
            raise self.error(name, f"must be at most {MAX_WHOLE:g}, got {value!r:.80}")
        return int(value)

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        least: float = 0.0,
        most: float = MAX_NUMBER,
    ) -> float:
        """A number from `least` up to `most`."""
        value = self._take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, f"must be a number, got {value!r:.80}")
        if not least <= value <= most:
            is_too_large = most == MAX_NUMBER and value > most
            bounds = f"{least:g} or more" if most == MAX_NUMBER else f"in {least:g}..{most:g}"
            bounds = f"at most {most:g}" if is_too_large else bounds
            raise self.error(name, f"must be {bounds}, got {value!r:.80}")
        return float(value)

    def positive(
        self, name: str, default: float | None = None, *, most: float = MAX_NUMBER
    ) -> float:
        value = self.number(name, default, most=most)
        if value == 0:
            raise self.error(name, "must be more than 0, got 0")
        if value < 1 / MAX_NUMBER:
            raise self.error(name, f"must be at least {1 / MAX_NUMBER:g}, got {value!r}")
        return value

    def table(self, name: str, *, required: bool = True) -> Table:
        value = self._take(name, None if required else {})
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be a table, got {value!r:.80}")
        return Table(value, self._file, self.where(name))

    def tables(self, name: str) -> list[Table]:
        """An array of tables with at least one."""
        value = self._take(name, None)
        if not isinstance(value, list) or not value:
            raise self.error(name, f"must be a list of tables, got {value!r:.80}")
        found = []
        for index, item in enumerate(value):
            if not isinstance(item, Mapping):
                raise self.error(f"{name}[{index}]", f"must be a table, got {item!r:.80}")
            found.append(Table(item, self._file, self.where(f"{name}[{index}]")))
        return found

    def texts(self, name: str) -> list[str]:
        value = self._take(name, None)
        if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
            raise self.error(name, f"must be a list of names, got {value!r:.80}")
        return value

    def notes(self, name: str) -> dict[str, str]:
        """An optional table of texts by field."""
        value = self._take(name, {})
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise self.error(name, f"must be a table of texts, got {value!r:.80}")
        return dict(value)

    def items(self) -> Iterator[tuple[str, Table]]:
        """Every field that is left, each a table."""
        for name in list(self._values):
            yield name, self.table(name)

    def done(self) -> None:
        """Raise `ConfigError` for a field that is not known."""
        if self._values:
            name = min(self._values)
            raise self.error(name, f"is not known, got {self._values[name]!r:.80}")

    def _take(self, name: str, default: Any) -> Any:
        value = self._values.pop(name, default)
        if value is None:
            raise self.error(name, "is missing")
        return value


def read_table(path: Path) -> Table:
    """A file's top table. Raises `ConfigError` naming the file when it cannot be read."""
    try:
        return Table(tomllib.loads(path.read_text(encoding="utf-8")), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error
