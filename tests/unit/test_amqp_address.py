"""AMQP URLs, right and wrong."""

from __future__ import annotations

import pytest

from shared.broker.rabbitmq.address import parse_address
from shared.errors import ConfigError


def test_a_full_url_is_taken_apart_and_unquoted() -> None:
    address = parse_address("amqps://us%40er:p%2Fw@broker.example:5999/my%2Fhost")

    assert (address.host, address.port, address.tls) == ("broker.example", 5999, True)
    assert address.virtual_host == "my/host"
    assert (address.credentials.username, address.credentials.password) == ("us@er", "p/w")


@pytest.mark.parametrize(
    ("url", "port", "virtual_host"),
    [
        ("amqp://h", 5672, "/"),
        ("amqp://h/", 5672, "/"),
        ("amqp://h/%2F", 5672, "/"),
        ("amqps://h/v", 5671, "v"),
    ],
)
def test_what_is_left_out_has_a_default(url: str, port: int, virtual_host: str) -> None:
    address = parse_address(url)

    assert (address.port, address.virtual_host) == (port, virtual_host)
    assert address.credentials.username == "guest"


def test_only_a_tls_url_carries_tls_options() -> None:
    plain = parse_address("amqp://h").parameters("publish", heartbeat_s=10)
    secure = parse_address("amqps://h").parameters("publish", heartbeat_s=10)

    assert plain.ssl_options is None
    assert secure.ssl_options.server_hostname == "h"


@pytest.mark.parametrize(
    "url",
    [
        "http://u:sesame@h/",
        "u:sesame@h:5672",
        "amqp://u:sesame@:5672/",
        "amqp://u:sesame@h:port/",
        "amqp://u:sesame@h:99999/",
        "amqp://u:sesame@[::1/",
        "amqp://u:x/sesame@h/",
        "amqp://u:x#sesame@h/",
        "amqp://u:x?sesame@h/",
        "amqp://u:sesame@h/?heartbeat=5",
        "",
    ],
)
def test_a_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_address(url)

    shown: BaseException | None = raised.value
    while shown is not None:
        assert "sesame" not in str(shown)
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)


def test_an_address_shows_no_password() -> None:
    address = parse_address("amqp://u:sesame@h:5672/")

    assert "sesame" not in f"{address} {address!r}"
