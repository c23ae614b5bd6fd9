"""Finds what requests that have ended have left in the store. Deletes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from shared.store import keys
from shared.store.connection import Stores


def leftover_keys(stores: Stores, request_ids: Iterable[str]) -> list[str]:
    """Keys of these requests that should be gone: KV pages, and whatever would stay for ever.

    Records and events stay for a while after the end, so that a client may read them again.
    """
    ended = set(request_ids)
    found: set[str] = set()
    for connection in {stores.meta, stores.kv}:
        cursor = b"0"
        while True:
            cursor, names = connection.run(
                ("SCAN", cursor, "MATCH", f"{keys.PREFIX}{{*", "COUNT", 1000)
            )
            ours = [
                name
                for name in (raw.decode("utf-8", "replace") for raw in names)
                if keys.request_id_of(name) in ended
            ]
            lives_ms = connection.run_all([("PTTL", name) for name in ours])
            found.update(
                name
                for name, life_ms in zip(ours, lives_ms, strict=True)
                if life_ms == -1 or keys.is_kv_page(name)
            )
            if cursor == b"0":
                break
    return sorted(found)
