"""Turns an AMQP URL into connection parameters. Never puts a password into a message."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

import pika

from shared.errors import ConfigError

DEFAULT_PORTS = {"amqp": 5672, "amqps": 5671}
URL_SHAPE = "amqp://USER:PASSWORD@HOST:PORT/VHOST (or amqps:// for TLS)"


@dataclass(frozen=True, slots=True)
class Address:
    """Where the broker is. Its `repr` and `str` show no password."""

    host: str
    port: int
    virtual_host: str
    tls: bool
    credentials: pika.PlainCredentials

    def __repr__(self) -> str:
        return f"Address({self})"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def parameters(self, role: str, *, heartbeat_s: int) -> pika.ConnectionParameters:
        """For one connection attempt; `role` shows up in the broker's list of connections."""
        return pika.ConnectionParameters(
            host=self.host,
            port=self.port,
            virtual_host=self.virtual_host,
            credentials=self.credentials,
            heartbeat=heartbeat_s,
            blocked_connection_timeout=30.0,  # a broker out of memory or disk: reconnect, retry
            connection_attempts=1,  # Link retries, with back-off
            socket_timeout=5.0,
            stack_timeout=10.0,
            ssl_options=(
                pika.SSLOptions(ssl.create_default_context(), self.host) if self.tls else None
            ),
            client_properties={"connection_name": f"cellpipe {role} {os.getpid()}"},
        )


def parse_address(url: str) -> Address:
    """Parse an AMQP URL (https://www.rabbitmq.com/docs/uri-spec); no options are supported.

    An empty virtual host means "/". Raises `ConfigError`, which repeats no part of the URL beyond
    scheme, host and port.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(
            "the AMQP URL cannot be read: its host or port is malformed",
            remedy=f"write it as {URL_SHAPE}",
        ) from error.__cause__  # the error itself may quote the password
    if parts.scheme not in DEFAULT_PORTS:
        raise ConfigError(
            f"the AMQP URL must start with amqp:// or amqps://, {_start_of(parts.scheme)}",
            remedy=f"write it as {URL_SHAPE}",
        )
    if not parts.hostname:
        raise ConfigError("the AMQP URL names no host", remedy=f"write it as {URL_SHAPE}")
    if parts.query or parts.fragment:
        raise ConfigError(
            "the AMQP URL must have no ?options and no #fragment",
            remedy=f"write it as {URL_SHAPE}; '?', '#' and '/' in a password are %3F, %23, %2F",
        )
    return Address(
        host=parts.hostname,
        port=port or DEFAULT_PORTS[parts.scheme],
        virtual_host=unquote(parts.path[1:]) or "/",
        tls=parts.scheme == "amqps",
        credentials=pika.PlainCredentials(
            unquote(parts.username or "guest"), unquote(parts.password or "guest")
        ),
    )


def _start_of(scheme: str) -> str:
    return f"not {scheme[:16]}://" if scheme else "but it has no scheme"
