"""The output file of a batch: one line a request, whatever is killed. Knows no queue."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.batch.lines import Entry, key_of
from shared.errors import ConfigError

MAX_FAILURES_TOLD = 3
MAX_MESSAGE_CHARS = 120


class BatchOutput:
    """Appends to a file that holds answers to some of a batch's lines, or does not exist yet.

    A line is appended whole and never changed, so what a killed run leaves is whole lines and
    at most the beginning of one, which is cut off here. `done` are the keys that have a line,
    `num_failed` how many of those tell of an error, `failures` what the first ones say. Errors of
    attempts before `attempt` are taken out, and those of lines that were changed since,
    `num_repaired`: they have no line then. A lock keeps a second run away.
    Raises `ConfigError` for a file that is in use or holds answers to other lines than `entries`.
    """

    def __init__(self, path: Path, entries: Iterable[Entry], *, attempt: int = 1) -> None:
        self._path = path
        self._entries = {entry.key: entry for entry in entries}
        self._numbers = {
            entry.custom_id: entry.number
            for entry in self._entries.values()
            if entry.custom_id is not None
        }
        self.done: set[str] = set()
        self.num_failed = self.num_repaired = 0
        self.failures: list[str] = []
        self._file = self._open()
        try:
            kept, num_dropped = self._read(attempt)
            if num_dropped:
                self._replace(kept)
        except BaseException:
            self.close()
            raise

    def write(self, line: dict[str, Any]) -> None:
        """Append the line of a request that has none yet. Raises `OSError` for a full disk."""
        if key_of(line["id"])[0] in self.done:
            raise ValueError(f"request {line['id']} has its line already")
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
        left = memoryview(text.encode(errors="replace"))  # a field's name may be half a surrogate
        while left:  # a full disk raises at the second write; the next run cuts off the first
            left = left[os.write(self._file, left) :]
        self._note(line)

    def close(self) -> None:
        os.close(self._file)

    def _open(self) -> int:
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise ConfigError(f"{self._path} is being written by another run") from error
        return file

    def _read(self, attempt: int) -> tuple[list[bytes], int]:
        """The lines that stay, and how many do not. Cuts off a killed run's last word."""
        end = 0
        kept = []
        num_dropped = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break
                end += len(text)
                line, key, number_of_attempt = self._known_line(number, text)
                if key in self.done:
                    raise ConfigError(f"line {number} of {self._path} answers {key} once more")
                if key not in self._entries:
                    self.num_repaired += 1
                    num_dropped += 1
                elif _has_failed(line) and number_of_attempt < attempt:
                    num_dropped += 1
                else:
                    kept.append(text)
                    self._note(line)
        os.ftruncate(self._file, end)
        return kept, num_dropped

    def _replace(self, lines: list[bytes]) -> None:
        """Leave these lines alone in the file: at any time it is the old one or the new one."""
        aside = self._path.with_name(f"{self._path.name}.new")
        with aside.open("wb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
        self.close()
        self._file = self._open()

    def _known_line(self, number: int, text: bytes) -> tuple[dict[str, Any], str, int]:
        """A line, its key and the number of its attempt.

        The key is no entry's only for an error of a line that was changed since.
        """
        try:
            line = dict(json.loads(text))
            key, attempt = key_of(line["id"])
            custom_id = line["custom_id"]
            is_ours = custom_id is None or custom_id in self._numbers
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            line, key, attempt, custom_id, is_ours = {}, "", 0, None, False
        if key in self._entries or (is_ours and _has_failed(line)):
            return line, key, attempt
        if is_ours and custom_id is not None:
            raise ConfigError(
                f"line {number} of {self._path} answers {custom_id!r:.80} as it was: line "
                f"{self._numbers[custom_id]} of the input, or an option, was changed since",
                remedy=f"remove line {number} of {self._path} to ask anew, or name another output",
            )
        raise ConfigError(
            f"line {number} of {self._path} is no answer to this input",
            remedy="name another output file, or remove it",
        )

    def _note(self, line: dict[str, Any]) -> None:
        key = key_of(line["id"])[0]
        self.done.add(key)
        if _has_failed(line):
            self.num_failed += 1
            if len(self.failures) < MAX_FAILURES_TOLD:
                self.failures.append(_failure_text(self._entries.get(key), line))


def _has_failed(line: dict[str, Any]) -> bool:
    response = line.get("response")
    return not isinstance(response, dict) or response.get("status_code") != 200


def _failure_text(entry: Entry | None, line: dict[str, Any]) -> str:
    """What a line of the input came to, in a line for people."""
    where = "" if entry is None else f"line {entry.number}"
    name = "" if line.get("custom_id") is None else f" ({line['custom_id']!r:.80})"
    told = line.get("error")
    if not isinstance(told, dict):
        response = line.get("response")
        body = response.get("body") if isinstance(response, dict) else None
        told = body.get("error") if isinstance(body, dict) else None
    message = str(told.get("message", "")) if isinstance(told, dict) else ""
    return f"{where}{name}: {' '.join(message.split()):.{MAX_MESSAGE_CHARS}}"
