"""Finds out which cluster and which model a command is for. Opens no connection."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from shared.config import Config
from shared.errors import ConfigError
from shared.logs import configure_logs

SERVERS_FILE = Path(".cellpipe/servers.json")
DEFAULT_MODEL = "smollm2-135m"


def load_config(*, quiet: bool = False) -> Config:
    """Read the environment and set up logs; the first line of every command.

    A `quiet` command tells its user what went wrong itself: it logs only when the settings ask.
    """
    config = Config.from_environ(os.environ)
    level = config.log_level or ("critical" if quiet else "info")
    configure_logs(level=level, log_format=config.log_format)
    return config


def with_cluster_urls(config: Config) -> Config:
    """Fill in missing URLs from the private servers that `infra/servers up` started here.

    Raises `ConfigError` when there are neither settings nor private servers.
    """
    if config.amqp_url and config.redis_url:
        return config
    try:
        found = json.loads(SERVERS_FILE.read_text())
        amqp_url, redis_url = str(found["amqp_url"]), str(found["redis_url"])
    except FileNotFoundError:
        missing = [
            name
            for name, value in (
                ("CELLPIPE_AMQP_URL", config.amqp_url),
                ("CELLPIPE_REDIS_URL", config.redis_url),
            )
            if not value
        ]
        raise ConfigError(
            f"no cluster is known: {' and '.join(missing)} not set",
            remedy="set them, or start a private cluster in this folder: make up "
            "(infra/servers up starts its servers alone)",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{SERVERS_FILE} cannot be read: {error}",
            remedy="start the private servers again: infra/servers down; infra/servers up",
        ) from error
    return replace(
        config,
        amqp_url=config.amqp_url or amqp_url,
        redis_url=config.redis_url or redis_url,
    )


def numbers(text: str, *, field: str, most: int = 1024) -> tuple[int, ...]:
    """1,4,16 as numbers, each once, in their order. Raises `ConfigError` naming the field."""
    pieces = text.replace(" ", "").split(",")
    if not all(piece.isascii() and piece.isdigit() for piece in pieces):
        raise ConfigError(f"{field} must be numbers such as 1,4,16, got {text!r}")
    found = tuple(dict.fromkeys(map(int, pieces)))
    if not all(1 <= number <= most for number in found):
        raise ConfigError(f"{field} must be in 1..{most}, got {text!r}")
    return found
