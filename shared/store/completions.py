"""What gateways remember of answers, so that any of them can go on with one. Knows no HTTP.

A completion is one or more requests whose events a gateway sends as one answer. The note says how;
the reader's name says who follows it now, so that the one who was cut off does not cancel it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shared.errors import StoreDamaged
from shared.store import keys
from shared.store.connection import Connection


class Completions:
    """Notes by completion id. Raises `StoreUnavailable`, `StoreDamaged`."""

    def __init__(self, meta: Connection) -> None:
        self._meta = meta

    def put(self, completion_id: str, note: Mapping[str, Any], *, ttl_s: float) -> None:
        """Remember a note of JSON values for `ttl_s`, in place of any before."""
        body = json.dumps(note, ensure_ascii=False, separators=(",", ":"))
        self._meta.run(("SET", keys.completion(completion_id), body, "PX", round(ttl_s * 1e3)))

    def get(self, completion_id: str) -> dict[str, Any] | None:
        """The note, or None. Raises `StoreDamaged` for one that is no JSON object."""
        raw = self._meta.run(("GET", keys.completion(completion_id)))
        if raw is None:
            return None
        try:
            note = json.loads(raw)
        except ValueError as error:
            raise StoreDamaged(f"the note of {completion_id} cannot be read: {error}") from error
        if not isinstance(note, dict):
            raise StoreDamaged(f"the note of {completion_id} is a {type(note).__name__}")
        return note

    def take(self, completion_id: str, reader: str, *, ttl_s: float) -> None:
        """Say that `reader` follows the answer now."""
        key = keys.completion_reader(completion_id)
        self._meta.run(("SET", key, reader, "PX", round(ttl_s * 1e3)))

    def reader(self, completion_id: str) -> str:
        """Who took it last; "" for nobody."""
        raw = self._meta.run(("GET", keys.completion_reader(completion_id)))
        return "" if raw is None else str(raw.decode("utf-8", "replace"))
