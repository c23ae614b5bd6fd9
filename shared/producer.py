"""Submits requests and follows their answers. Knows no worker, layout or kernel."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator

from shared import codec
from shared.broker.base import Broker, Outgoing
from shared.errors import Overloaded, PublishRefused, RequestError, TransientError
from shared.messages import FinishReason, Request
from shared.store.ledger_base import START, RequestLedger
from shared.store.ledger_types import Event, FinalEvent
from shared.topology import REQUESTS_QUEUE

DEADLINE_GRACE_MS = 10_000  # for a scheduler that waits for a server, or is replaced by another
RETRY_AFTER_S = 5.0  # a full queue takes more once a fifth of it has been served


def new_request_id() -> str:
    """A fresh request id: 96 random bits in hex, behind "r-"."""
    return f"r-{secrets.token_hex(12)}"


def hand_over(broker: Broker, request: Outgoing, timeout_s: float) -> None:
    """Publish a message to the request queue. Raises `Overloaded`, and what `Confirm.wait` does."""
    try:
        broker.publish([request]).wait(timeout_s)
    except PublishRefused as error:
        raise Overloaded(
            f"the cluster takes no more requests for now: {error}", retry_after_s=RETRY_AFTER_S
        ) from error


class Producer:
    """A connection of a user to a cluster, or to the embedded pipeline.

    `gather_s` is how long `events` waits after each read, so that a read brings several tokens.
    """

    def __init__(self, broker: Broker, ledger: RequestLedger, *, gather_s: float = 0.0) -> None:
        self._broker = broker
        self._ledger = ledger
        self._gather_s = gather_s

    def submit(self, request: Request, *, timeout_s: float = 10.0) -> None:
        """Hand a request over; when this returns, the broker has it and it will be answered.

        Raises `Overloaded` when the queue is full: then nothing was taken, and nothing will come
        of it. Raises `Unroutable` when no cluster has ever declared it, `ConfirmTimeout` or
        `BrokerUnavailable` when its fate is unknown: submitting the same request_id again is then
        safe. Raises `RequestError` for one that is too large.
        """
        body = codec.encode(request)
        if len(body) > codec.MAX_FRAME_BYTES:
            raise RequestError(
                f"the request takes {len(body)} bytes, over the limit of {codec.MAX_FRAME_BYTES}",
                remedy="send a shorter prompt",
            )
        hand_over(self._broker, Outgoing(REQUESTS_QUEUE, body, persistent=True), timeout_s)

    def events(
        self,
        request_id: str,
        *,
        after: str = START,
        silence_s: float | None = None,
        on_silence: Callable[[], None] | None = None,
        deadline_unix_ms: int = 0,
    ) -> Iterator[Event]:
        """Yield a request's events after the event id `after`, ending with the final one.

        Calls `on_silence` about once a second while nothing comes, and raises `TransientError`
        after `silence_s` seconds of it, or when the request's deadline is over and its end, which
        the scheduler then writes, does not come.
        """
        heard_s = time.monotonic()
        while True:
            block_ms = 1000 if silence_s is None else max(1, min(1000, int(silence_s * 1000)))
            events = self._ledger.events(request_id, after, block_ms=block_ms)
            for event in events:
                yield event
                if isinstance(event, FinalEvent):
                    return
                after = event.event_id
            if events:
                heard_s = time.monotonic()
                if self._gather_s:
                    time.sleep(self._gather_s)
                continue
            if on_silence is not None:
                on_silence()
            if 0 < deadline_unix_ms < _unix_ms() - DEADLINE_GRACE_MS:
                raise TransientError(
                    f"the deadline of request {request_id} has passed, and nobody has ended it",
                    remedy="look at the cluster: cellpipe status",
                )
            if silence_s is not None and time.monotonic() - heard_s > silence_s:
                raise TransientError(
                    f"nothing was heard of request {request_id} for {silence_s:g} s",
                    remedy="look at the cluster: cellpipe status",
                )

    def cancel(self, request_id: str) -> None:
        """End a request from outside; nothing happens if it has ended.

        Raises `RequestError` if no scheduler has admitted it (yet).
        """
        if not self._ledger.finish(request_id, FinishReason.ABORT) and not self._ledger.states(
            [request_id]
        ):
            raise RequestError(f"request {request_id} is not known")


def _unix_ms() -> int:
    return time.time_ns() // 1_000_000
