"""Content headers that pika cannot decode: times after the year 9999, foreign or deeply nested
values. RabbitMQ takes them, and would give such a message out for ever to whoever loses its
connection over it. Pure.
"""

from __future__ import annotations

import struct

_FRAME = struct.Struct(">BHL")  # type, channel, bytes of payload; one byte ends the frame
_LENGTH = struct.Struct(">L")
_HEADER = 2  # the frame type of content headers
_FLAGS_AT = 12  # after class, weight and body size
_CONTENT_TYPE, _CONTENT_ENCODING, _HEADERS, _MORE_FLAGS = 1 << 15, 1 << 14, 1 << 13, 1


def without_headers(buffer: bytes) -> tuple[int, bytes] | None:
    """The first frame of a buffer with an empty table of headers, and how long it was.

    None for a frame that is no content header or has no such table. The frame is whole.
    """
    frame_type, channel, num_bytes = _FRAME.unpack_from(buffer)
    end = _FRAME.size + num_bytes + 1
    payload = buffer[_FRAME.size : end - 1]
    if frame_type != _HEADER:
        return None
    offset = _FLAGS_AT
    flags = more = int.from_bytes(payload[offset : offset + 2], "big")
    offset += 2
    while more & _MORE_FLAGS:
        more = int.from_bytes(payload[offset : offset + 2], "big")
        offset += 2
    if not flags & _HEADERS:
        return None
    for flag in (_CONTENT_TYPE, _CONTENT_ENCODING):
        offset += 1 + payload[offset] if flags & flag else 0
    (table_bytes,) = _LENGTH.unpack_from(payload, offset)
    rest = payload[offset + _LENGTH.size + table_bytes :]
    payload = payload[:offset] + _LENGTH.pack(0) + rest
    return end, _FRAME.pack(frame_type, channel, len(payload)) + payload + buffer[end - 1 : end]
