"""Who may use the API, and how much at once. Knows no HTTP and no request."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from shared.api.errors import ApiError
from shared.errors import ConfigError

MIN_KEY_CHARS = 16
ANONYMOUS = ""
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64}) sha256:([0-9a-f]{64})\Z")


def new_key() -> str:
    """A fresh key of 256 random bits."""
    return f"cp-{secrets.token_urlsafe(32)}"


def key_line(name: str, key: str) -> str:
    """The line of a key file that lets `key` in. Raises `ConfigError` for a malformed name."""
    line = f"{name} sha256:{_digest(key).hex()}"
    if not _LINE.match(line):
        raise ConfigError(f"the name of a key must be 1-64 of A-Z a-z 0-9 . _ -, got {name!r:.80}")
    return line


class Keys:
    """Digests of keys by name. Without any key, everybody is `ANONYMOUS`.

    A key is random and long, so that one round of SHA-256 is enough to keep it from who reads the
    file.
    """

    def __init__(self, digests: Iterable[tuple[str, bytes]] = ()) -> None:
        self._digests = tuple(digests)

    @classmethod
    def read(cls, keys: str | None, file: Path | None) -> Keys:
        """From the setting, keys between commas, and from a file of `key_line`s.

        Raises `ConfigError` for a key that is short, and for a line that is none.
        """
        digests = []
        for number, key in enumerate(filter(None, map(str.strip, (keys or "").split(","))), 1):
            if len(key) < MIN_KEY_CHARS:
                raise ConfigError(
                    f"CELLPIPE_API_KEYS: key {number} has fewer than {MIN_KEY_CHARS} characters",
                    remedy="make one: cellpipe key NAME",
                )
            digests.append((f"key-{number}", _digest(key)))
        if file is not None:
            digests += _read_file(file)
        return cls(digests)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, authorization: str | None) -> str:
        """Whose key it is. Raises `ApiError` 401.

        How long it takes does not tell how much of a key is right.
        """
        if not self._digests:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise ApiError(401, "no API key: send it as Authorization: Bearer KEY")
        given = _digest(key.strip())
        found = ANONYMOUS
        for name, digest in self._digests:  # all of them, whichever fits
            if hmac.compare_digest(given, digest):
                found = name
        if found == ANONYMOUS:
            raise ApiError(401, "the API key is not known here", code="invalid_api_key")
        return found


def _read_file(file: Path) -> list[tuple[str, bytes]]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the key file {file} cannot be read: {error}") from error
    found = []
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.match(line)
        if match is None:  # it may be a key in clear: not to be shown
            raise ConfigError(
                f"line {number} of the key file {file} is not `NAME sha256:HEX`",
                remedy="make one: cellpipe key NAME",
            )
        found.append((match[1], bytes.fromhex(match[2])))
    if not found:
        raise ConfigError(f"the key file {file} holds no key")
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(slots=True)
class _Use:
    """What one key uses now. `tokens` of its bucket as of `at_s`."""

    num_running: int
    tokens: float
    at_s: float


class Limits:
    """How many answers one key has at once, and how many requests it may start in a minute."""

    def __init__(
        self,
        *,
        max_running: int,
        max_per_minute: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_running = max_running
        self._max_per_minute = max_per_minute
        self._clock = clock
        self._uses: dict[str, _Use] = {}

    def enter(self, name: str, num_answers: int) -> None:
        """Count answers in, until `leave`. Raises `ApiError` 429 when it would be too many."""
        now_s = self._clock()
        burst = float(self._max_per_minute or 0)
        use = self._uses.setdefault(name, _Use(0, burst, now_s))
        if num_answers > self._max_running:
            raise ApiError(
                400, f"the request asks for {num_answers} answers; {self._max_running} may run"
            )
        if use.num_running + num_answers > self._max_running:
            raise ApiError(
                429,
                f"{use.num_running} answers run for this key, and {self._max_running} may",
                code="too_many_running",
                retry_after_s=1.0,
            )
        if self._max_per_minute is not None:
            rate = self._max_per_minute / 60
            use.tokens = min(burst, use.tokens + (now_s - use.at_s) * rate)
            use.at_s = now_s
            if use.tokens < 1:
                raise ApiError(
                    429,
                    f"more than {self._max_per_minute} requests a minute for this key",
                    code="rate_limit_exceeded",
                    retry_after_s=(1 - use.tokens) / rate,
                )
            use.tokens -= 1
        use.num_running += num_answers

    def leave(self, name: str, num_answers: int) -> None:
        self._uses[name].num_running -= num_answers
