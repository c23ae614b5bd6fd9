"""Sets up structured logs on standard error. Knows no service.

One closing line per unit of work, with fields; never prompt text, and never a password in a URL.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

_PASSWORD_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/@:]*:)[^\s/@]*@")


def redact(text: str) -> str:
    """`text` with every password inside a URL replaced by ***."""
    return _PASSWORD_IN_URL.sub(r"\1***@", text)


def _redact_fields(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in fields.items():
        if isinstance(value, str) and "://" in value:
            fields[key] = redact(value)
    return fields


def configure_logs(*, level: str = "info", log_format: str = "console") -> None:
    """Send log events at or above `level` to standard error, as text or as one JSON object a line.

    Third-party loggers (pika speaks of every lost connection at ERROR) are kept to CRITICAL: the
    adapters report what matters as events of ours.
    """
    logging.basicConfig(level=logging.CRITICAL, stream=sys.stderr)
    renderer: Any = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact_fields,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
