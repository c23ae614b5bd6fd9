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
# Read by the tests, the Makefile and infra/servers, not by the program.
FOREIGN_KEYS = ("CELLPIPE_ALLOW_INSTALL",)
FOREIGN_PREFIX = "CELLPIPE_TEST_"

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\Z", re.IGNORECASE)
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

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Raises `ConfigError` naming the key and the value for anything unknown or malformed."""
        values: dict[str, str] = {}
        for key, value in environ.items():
            if not key.startswith(PREFIX) or key in FOREIGN_KEYS or key.startswith(FOREIGN_PREFIX):
                continue
            name = key.removeprefix(PREFIX).lower()
            if name not in cls.__slots__:
                known = ", ".join(PREFIX + n.upper() for n in cls.__slots__)
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
        return cls(cache_dir=cache_dir, **values)


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
