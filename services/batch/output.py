"""The output file of a batch: one line a request, whatever is killed. Knows no queue."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from shared.errors import ConfigError


class BatchOutput:
    """Appends to a file that holds answers to some of `request_ids`, or does not exist yet.

    A line is appended whole and never changed, so what a killed run leaves is whole lines and
    at most the beginning of one, which is cut off here. `done` are the ids that have a line,
    `num_failed` how many of those tell of an error. A lock keeps a second run away.
    Raises `ConfigError` for a file that is in use or was not written for these requests.
    """

    def __init__(self, path: Path, request_ids: Collection[str]) -> None:
        self._path = path
        self.done: set[str] = set()
        self.num_failed = 0
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._lock()
            self._read(frozenset(request_ids))
        except BaseException:
            self.close()
            raise

    def write(self, line: dict[str, Any]) -> None:
        """Append the line of a request that has none yet. Raises `OSError` for a full disk."""
        request_id = line["id"]
        if request_id in self.done:
            raise ValueError(f"request {request_id} has its line already")
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
        left = memoryview(text.encode())
        while left:  # a full disk raises at the second write; the next run cuts off the first
            left = left[os.write(self._file, left) :]
        self._note(line)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{self._path} is being written by another run") from error

    def _read(self, request_ids: frozenset[str]) -> None:
        end = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, text in enumerate(file, start=1):
                if not text.endswith(b"\n"):
                    break  # a killed run's last word
                end += len(text)
                self._note(self._known_line(number, text, request_ids))
        os.ftruncate(self._file, end)

    def _known_line(self, number: int, text: bytes, request_ids: frozenset[str]) -> dict[str, Any]:
        try:
            line = json.loads(text)
            request_id = line["id"]
        except (ValueError, KeyError, TypeError, RecursionError):
            line, request_id = {}, None
        if request_id not in request_ids:
            raise ConfigError(
                f"line {number} of {self._path} is no answer to this input with these options",
                remedy="name another output file, or remove it",
            )
        if request_id in self.done:
            raise ConfigError(f"line {number} of {self._path} answers {request_id} once more")
        return dict(line)

    def _note(self, line: dict[str, Any]) -> None:
        self.done.add(line["id"])
        response = line.get("response")
        if not isinstance(response, dict) or response.get("status_code") != 200:
            self.num_failed += 1
