"""uvicorn's HTTP/1.1, with a time limit for headers: it has none of its own. Knows no endpoint."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_TIMEOUT_S = 15.0


class TimedH11Protocol(H11Protocol):
    """Closes a connection that begins a request, or is new, and does not bring its headers."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._awaits_headers():
            self._arm()
        else:
            self._disarm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def _awaits_headers(self) -> bool:
        buffered: Any = self.conn.trailing_data[0]
        return self.conn.their_state is h11.IDLE and bool(buffered)

    def _arm(self) -> None:
        if self._timer is None:  # not again with every byte: that would be no limit
            self._timer = self.loop.call_later(HEADER_TIMEOUT_S, self._give_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self.transport.close()
