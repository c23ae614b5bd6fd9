"""Waits until a store answers again, up to a bound. Knows nothing of what is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from shared.backoff import Backoff
from shared.errors import StoreUnavailable

T = TypeVar("T")
OnOutage = Callable[[StoreUnavailable], None]

# What supervises a server starts it again within seconds; the rest is for it to read its file.
# Whoever sits before a terminal wants to hear by then.
OUTAGE_PATIENCE_S = 30.0
LONGEST_WAIT_S = 1.0  # between two tries: an answer goes on soon after the server does


def wait_out(
    work: Callable[[], T],
    *,
    what: str = "",
    patience_s: float = OUTAGE_PATIENCE_S,
    on_outage: OnOutage | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """The result of `work`, which may be repeated: again while the store does not answer.

    Calls `on_outage` with the first failure, before it waits. Raises the `StoreUnavailable` of the
    last try when another would begin later than `patience_s` seconds after the first, and says
    `what` could not be done.
    """
    backoff = Backoff(first_s=0.05, max_s=LONGEST_WAIT_S)
    began_s = clock()
    while True:
        try:
            return work()
        except StoreUnavailable as error:
            wait_s = backoff.next_s()
            if clock() + wait_s - began_s > patience_s:
                text = f"{what}: {error}" if what else str(error)
                raise StoreUnavailable(text, remedy=error.remedy) from error
            if backoff.failures == 1 and on_outage is not None:
                on_outage(error)
        sleep(wait_s)
