"""Serves the gateway on a socket until it is told to stop. Knows no endpoint."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from services.gateway.access import Keys
from services.gateway.app import HttpOptions, make_app
from services.gateway.front import LOOPBACK_NAMES
from services.gateway.gateway import Gateway
from services.gateway.protocol import TimedH11Protocol
from shared.errors import ConfigError, TransientError

MAX_HEADER_BYTES = 32 << 10
MAX_CONNECTIONS = 2048
IDLE_S = 30  # of a connection between two requests


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """`grace_s`: how long running answers may take to end when the server stops."""

    host: str = "127.0.0.1"
    port: int = 8000
    allow_anonymous: bool = False
    grace_s: float = 30.0
    tls_cert: Path | None = None
    tls_key: Path | None = None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address. A name but localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_options(options: ServerOptions, keys: Keys) -> None:
    """Raise `ConfigError` for what would let anybody in, and for half of a TLS pair."""
    if not (keys or options.allow_anonymous or is_loopback(options.host)):
        raise ConfigError(
            f"--host {options.host} lets other machines in, and there is no API key",
            remedy="set CELLPIPE_API_KEYS or --api-keys-file, or say --allow-anonymous",
        )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together")
    for file in (options.tls_cert, options.tls_key):
        if file is not None and not file.is_file():
            raise ConfigError(f"the TLS file {file} does not exist")


def listen(options: ServerOptions) -> socket.socket:
    """A socket that listens. Raises `ConfigError` for an address that is none of this machine's.

    Raises `TransientError` when the port is taken: it may be free later.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except socket.gaierror as error:
        raise ConfigError(f"--host {options.host} is no address: {error.strerror}") from error
    except PermissionError as error:
        raise ConfigError(f"port {options.port} is not for this user") from error
    except OSError as error:
        raise TransientError(
            f"{options.host}:{options.port} cannot be listened on: {error.strerror}",
            remedy="choose another: --port N",
        ) from error


def serve(
    gateway: Gateway,
    keys: Keys,
    options: ServerOptions,
    http: HttpOptions,
    *,
    listening: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then let running answers end. Calls `listening(url)` first."""
    check_options(options, keys)
    with listen(options) as sock:
        if not keys and not options.allow_anonymous:
            http = HttpOptions(http.max_body_bytes, http.keep_alive_s, LOOPBACK_NAMES, http.origins)
        config = uvicorn.Config(
            make_app(gateway, keys, http),
            http=TimedH11Protocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=max(1, round(options.grace_s)),
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
        host, port = sock.getsockname()[:2]
        scheme = "https" if options.tls_cert else "http"
        listening(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        asyncio.run(uvicorn.Server(config).serve(sockets=[sock]))
