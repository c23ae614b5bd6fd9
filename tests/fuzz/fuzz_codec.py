"""Any bytes, as a frame of either content type: refused, or a message that lasts a round trip."""

from __future__ import annotations

from shared.codec import JSON, MSGPACK, decode, encode, request_id_of
from shared.errors import DecodeError, RequestError
from tests.unit.codec_examples import EXAMPLES

PREFIX_BYTES = 0


def one_input(body: bytes) -> None:
    for content_type in (MSGPACK, JSON):
        try:
            message = decode(body, content_type)
        except (DecodeError, RequestError):
            request_id_of(body, content_type)
        else:
            frame = encode(message)
            assert encode(decode(frame)) == frame, "another message after a round trip"


def seeds() -> dict[str, bytes]:
    """A valid frame of every kind of message."""
    return {name: encode(message) for name, message in EXAMPLES.items()}
