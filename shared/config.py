"""Reads cellpipe's environment once, strictly. Knows no connection and no command line.

Entry points call `Config.from_environ` and pass values down; nothing below them reads the
environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError
from shared.kernel.names import AUTO, KERNELS

PREFIX = "CELLPIPE_"
DEFAULT_CACHE_DIR = "~/.cache/cellpipe/models"
LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("console", "json")
KEEP_ANSWERS_S = 3_600.0
MAX_KEPT_S = 30 * 86_400.0
# Read by the tests, the Makefile and infra/servers, not by the program.
FOREIGN_KEYS = ("CELLPIPE_ALLOW_INSTALL",)
FOREIGN_PREFIX = "CELLPIPE_TEST_"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\Z", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)?\Z")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, None: 1.0}
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Config:
    """What the environment says. It holds passwords and keys: never log one."""

    amqp_url: str | None = None
    redis_url: str | None = None
    redis_kv_url: str | None = None
    redis_weights_url: str | None = None
    cache_dir: Path = Path(DEFAULT_CACHE_DIR)
    log_level: str | None = None
    log_format: str = "console"
    kernel: str = AUTO
    api_keys: str | None = None
    keep_answers_s: float = KEEP_ANSWERS_S

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Raises `ConfigError` naming the key and the value for anything unknown or malformed."""
        values: dict[str, str] = {}
        for key, value in environ.items():
            if not key.startswith(PREFIX) or key in FOREIGN_KEYS or key.startswith(FOREIGN_PREFIX):
                continue
            name = key.removeprefix(PREFIX).lower()
            if name not in _SETTINGS:
                known = ", ".join(PREFIX + n.upper() for n in _SETTINGS)
                raise ConfigError(f"unknown setting {key}", remedy=f"known settings: {known}")
            if value:
                values[name] = value
        for name, allowed in (
            ("log_level", LOG_LEVELS),
            ("log_format", LOG_FORMATS),
            ("kernel", KERNELS),
        ):
            if name in values and values[name] not in allowed:
                raise ConfigError(
                    f"{PREFIX}{name.upper()} must be one of {', '.join(allowed)}, "
                    f"got {values[name]!r}"
                )
        cache_dir = Path(values.pop("cache_dir", DEFAULT_CACHE_DIR)).expanduser()
        keep = values.pop("keep_answers", "")
        keep_answers_s = KEEP_ANSWERS_S
        if keep:
            keep_answers_s = parse_duration(keep, field=f"{PREFIX}KEEP_ANSWERS", most_s=MAX_KEPT_S)
        return cls(cache_dir=cache_dir, keep_answers_s=keep_answers_s, **values)


# A setting is the field's name without its unit.
_SETTINGS = tuple(name.removesuffix("_s") for name in Config.__slots__)


def parse_duration(text: str, *, field: str, most_s: float = 86_400.0) -> float:
    """Seconds in "2s", "500ms", "1.5m", "1h" or "3". Raises `ConfigError` naming the field."""
    match = _DURATION.match(text)
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0.0 < seconds <= most_s:
        raise ConfigError(
            f"{field} must be a time such as 2s, 500ms or 1m, at most {most_s:g} s; got {text!r}"
        )
    return seconds


def parse_size(text: str, *, field: str) -> int:
    """Bytes in "256MiB", "1.5 GB" or "4096". Raises `ConfigError` naming the field."""
    match = _SIZE.match(text.strip())
    if not match:
        raise ConfigError(f"{field} must be a size such as 256MiB, got {text!r}")
    base = 1024 if match[3] else 1000
    size = int(float(match[1]) * base ** _POWERS[match[2].upper()])
    if size <= 0:
        raise ConfigError(f"{field} must be positive, got {text!r}")
    return size


def size_text(num_bytes: int) -> str:
    """A size as a user writes it, exact where a unit divides it: 128MiB, 1500MB, else 44.2MB."""
    for unit, size in (
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("GB", 10**9),
        ("MB", 10**6),
    ):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return f"{num_bytes / 1e6:.1f}MB" if num_bytes >= 10**6 else f"{num_bytes} bytes"


def enough_text(num_bytes: int) -> str:
    """The least whole MiB that hold so many bytes, as an option takes them."""
    return f"{-(-num_bytes // (1 << 20))}MiB"
