"""Short texts of AMQP, which may be any bytes: as str inside, as they came on the wire. Pure."""

from __future__ import annotations


def from_wire(value: str | bytes | None) -> str:
    """A property as pika gives it: bytes where they are no UTF-8. Each such byte is a lone
    surrogate then, so that a correlation id goes back as it came."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value or ""


def to_wire(text: str) -> str | bytes:
    """What `from_wire` gave, as pika takes it."""
    return text if text.isascii() else text.encode("utf-8", "surrogateescape")
