"""What is written on a message that goes to the dead-letter queue. Knows no connection.

A dead letter keeps the body of the message as it was, so that it can be sent again, and carries
its history in headers that begin with `cellpipe-`. A message that the broker itself moved there
has none, and of that only its first queue is known.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from shared.broker.base import Delivery, Headers, Outgoing
from shared.topology import DEAD_QUEUE

PREFIX = "cellpipe-"
MAX_REASON_CHARS = 1_000


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Why a message died. `queue` is where it was taken, or where it belongs; `group` -1 is none.

    `workers` are the processes that began it and did not come back, then the one that buried it.
    """

    reason: str
    queue: str = ""
    request_id: str = ""
    group: int = -1
    attempts: int = 0
    workers: tuple[str, ...] = ()
    died_unix_ms: int = 0

    def headers(self) -> Headers:
        """As texts, the form that headers travel in."""
        values = {
            "reason": self.reason[:MAX_REASON_CHARS],
            "queue": self.queue,
            "request-id": self.request_id,
            "group": str(self.group),
            "attempts": str(self.attempts),
            "workers": json.dumps(self.workers),
            "died-unix-ms": str(self.died_unix_ms or time.time_ns() // 1_000_000),
        }
        return tuple((PREFIX + name, value) for name, value in values.items())

    @classmethod
    def of(cls, delivery: Delivery) -> DeadLetter:
        """Read a delivery of the dead-letter queue; what is missing or malformed is left out."""
        texts = dict(delivery.headers)
        return cls(
            reason=texts.get(PREFIX + "reason", ""),
            queue=texts.get(PREFIX + "queue", delivery.handed_over_from),
            request_id=texts.get(PREFIX + "request-id", ""),
            group=_number(texts.get(PREFIX + "group"), -1),
            attempts=_number(texts.get(PREFIX + "attempts"), 0),
            workers=_names(texts.get(PREFIX + "workers")),
            died_unix_ms=_number(texts.get(PREFIX + "died-unix-ms"), 0),
        )

    def message(self, delivery: Delivery) -> Outgoing:
        """The message to publish, before the delivery is acked."""
        return Outgoing(
            DEAD_QUEUE,
            delivery.content,
            persistent=True,
            content_type=delivery.content_type,
            correlation_id=delivery.correlation_id,
            reply_to=delivery.reply_to,
            headers=self.headers(),
        )


def _number(text: str | None, default: int) -> int:
    digits = (text or "").removeprefix("-")
    return (
        int(text or "") if digits.isascii() and digits.isdigit() and len(digits) < 19 else default
    )


def _names(text: str | None) -> tuple[str, ...]:
    try:
        names = json.loads(text or "[]")
    except (ValueError, RecursionError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()
