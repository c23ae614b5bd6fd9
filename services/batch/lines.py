"""The lines of a batch file, and the request id of each. Knows no queue and no answer.

The format is https://platform.openai.com/docs/guides/batch: a JSON object a line with `custom_id`,
`method`, `url` and `body`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from shared.api.ask import Ask, num_choices, read_ask
from shared.api.errors import ApiError, api_error
from shared.api.model import ApiModel
from shared.api.schema import ChatCompletion, Generation, TextCompletion, check_body
from shared.errors import CellpipeError, ConfigError
from shared.messages import Request

KINDS: dict[str, type[Generation]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": TextCompletion,
}
MAX_CUSTOM_ID_CHARS = 512
_DIGEST_CHARS = 40
_PREFIX = "batch-"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a request stands in the file. `custom_id` None: the line has none that can be read.

    The first attempt's `request_id` is the `key` of the line, a later one's has a number behind it.
    """

    number: int
    offset: int
    num_bytes: int
    custom_id: str | None
    request_id: str

    @property
    def key(self) -> str:
        return key_of(self.request_id)[0]


def key_of(request_id: str) -> tuple[str, int]:
    """The key of the line that a request id was made for, and the number of the attempt.

    Raises `ValueError` for another id.
    """
    key = request_id[: len(_PREFIX) + _DIGEST_CHARS]
    rest = request_id.removeprefix(key)
    return key, int(rest.removeprefix("-")) if rest else 1


@dataclass(frozen=True, slots=True)
class Line:
    """A line that was read: the answers it asks for, each a request, or why it cannot be served."""

    entry: Entry
    ask: Ask | None = None
    stops: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()
    error: ApiError | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What lines are read for. `chat_tokens` is for a chat that names no limit, None for what the
    model holds."""

    model: ApiModel
    chat_tokens: int | None = None


class BatchInput:
    """A batch file. Its lines stay in the file until they are read; blank ones are none.

    `salt` is whatever else an answer depends on: request ids are made from the bytes of the line,
    the salt, the custom_id and the `attempt`, so that a second run finds what the first has asked,
    also when other lines were changed meanwhile.
    Raises `ConfigError` for a file that cannot be read, is empty, or has a custom_id twice.
    """

    def __init__(self, path: Path, *, salt: str, attempt: int = 1) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self.entries = list(_entries(file, salt.encode(), attempt))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        if not self.entries:
            raise ConfigError(f"{path} holds no request")
        seen: dict[str, int] = {}
        for entry in self.entries:
            if entry.custom_id is not None:
                first = seen.setdefault(entry.custom_id, entry.number)
                if first != entry.number:
                    raise ConfigError(
                        f"{path} has custom_id {entry.custom_id!r:.80} on lines {first} and "
                        f"{entry.number}",
                        remedy="each needs one of its own: it names the line of the answer",
                    )

    def read(self, entry: Entry, reading: Reading) -> Line:
        """What a line asks for."""
        with self._path.open("rb") as file:
            file.seek(entry.offset)
            text = file.read(entry.num_bytes)
        return read_line(entry, text, reading)


def read_line(entry: Entry, text: bytes, reading: Reading) -> Line:
    """Whatever is wrong with the line is told in it."""
    try:
        return _read(entry, text, reading)
    except ApiError as error:
        return Line(entry, error=error)
    except CellpipeError as error:
        return Line(entry, error=api_error(error))


def _read(entry: Entry, text: bytes, reading: Reading) -> Line:
    try:
        raw = from_json(text, allow_inf_nan=False)  # as a gateway reads a body
    except ValueError as error:
        raise ApiError(400, f"line {entry.number} is not JSON in UTF-8: {error!s:.200}") from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"line {entry.number} is no JSON object")
    if entry.custom_id is None:
        raise ApiError(400, f"line {entry.number} has no custom_id", param="custom_id")
    url, body = raw.get("url"), raw.get("body")
    if not isinstance(url, str) or url not in KINDS:
        raise ApiError(400, f"url must be one of {', '.join(KINDS)}", param="url")
    if raw.get("method") != "POST":
        raise ApiError(400, "method must be POST", param="method")
    if not isinstance(body, dict):
        raise ApiError(400, "body must be an object", param="body")
    return _line_of(entry, check_body(body, KINDS[url]), reading)


def _line_of(entry: Entry, body: Generation, reading: Reading) -> Line:
    if body.stream:
        raise ApiError(
            400, "stream is not for a batch", param="stream", code="unsupported_parameter"
        )
    num_choices(body)
    ask = read_ask(body, reading.model, chat_tokens=reading.chat_tokens)
    requests = tuple(
        Request(
            request_id=entry.request_id if number == 0 else f"{entry.request_id}-c{number}",
            token_ids=ask.prompts[number // ask.n],
            model=reading.model.model_id,
            sampling=sampling,
            response_format=ask.form.response_format,
        )
        for number, sampling in enumerate(ask.samplings)
    )
    return Line(entry, ask, body.stop, requests)


def _entries(lines: Any, seed: bytes, attempt: int) -> Iterator[Entry]:
    suffix = f"-{attempt}" if attempt > 1 else ""
    offset = 0
    for number, text in enumerate(lines, start=1):
        if text.strip():
            custom_id = _custom_id(text)
            key = f"line {number}" if custom_id is None else f"id {custom_id}"
            parts = b"\0".join((seed, key.encode(), text.strip()))
            digest = hashlib.sha256(parts).hexdigest()[:_DIGEST_CHARS]
            yield Entry(number, offset, len(text), custom_id, f"{_PREFIX}{digest}{suffix}")
        offset += len(text)


def _custom_id(text: bytes) -> str | None:
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        return None
    custom_id = raw.get("custom_id") if isinstance(raw, dict) else None
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        return None
    return None if _has_half_a_pair(custom_id) else custom_id


def _has_half_a_pair(text: str) -> bool:
    """Whether JSON escapes smuggled in what UTF-8 cannot carry."""
    return any("\ud800" <= character <= "\udfff" for character in text)
