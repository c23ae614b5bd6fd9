"""The time of day that all processes of a cluster go by: the store's. Knows no key.

A deadline is a time of day, and machines of a crowd have clocks of their own: one that is wrong
would end every request that it sees.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from shared.errors import StoreUnavailable
from shared.store.ledger_base import RequestLedger

log = structlog.get_logger()

_READ_EVERY_S = 10.0  # a machine's seconds are right, its date may not be


class SharedClock:
    """Between two looks at the store it goes on by itself, whatever is done to the machine's clock.

    Until the store has told, it is this machine's time of day.
    """

    def __init__(
        self, ledger: RequestLedger, *, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._ledger = ledger
        self._monotonic_s = monotonic_s
        self._told_unix_ms = time.time_ns() // 1_000_000
        self._told_at_s = monotonic_s()
        self._read_at_s = self._told_at_s

    def unix_ms(self) -> int:
        now_s = self._monotonic_s()
        if now_s >= self._read_at_s:
            self._read_at_s = now_s + _READ_EVERY_S
            try:
                self._told_unix_ms = self._ledger.now_unix_ms()
                self._told_at_s = now_s
            except StoreUnavailable as error:
                log.warning("time_not_read", reason=str(error))
        return self._told_unix_ms + round((now_s - self._told_at_s) * 1000)
