"""What every broker promises. Bodies are bytes here: a broker knows no message and no model.

A sender may leave the making of bytes to whoever looks. A broker that needs none hands on what it
was given.

The promises, held by one contract suite for every variant:

1. `publish` returns a `Confirm`; when `wait` returns, the broker has the message. A message whose
   queue does not exist raises `Unroutable`, a full queue `PublishRefused`, and silence
   `ConfirmTimeout`. A message that names a queue `instead` is sent there when the first is missing.
2. A delivery stays unsettled until it is acked or rejected. If its consumer goes away, it is
   delivered again, with `redelivered` true. `reject(requeue=False)` moves it to the queue's
   dead-letter queue, and so does waiting for longer than the queue's `message_ttl_ms`; whoever
   takes it there sees in `handed_over_from` where it was first.
3. A settled delivery is never settled twice, and a delivery of a lost connection is dropped
   silently by `ack` and `reject`: the broker redelivers it anyway.
4. `take` hands out deliveries of all consumed queues in order of arrival; no more than `prefetch`
   unsettled deliveries per queue.
5. All methods may be called from any thread, but the consumer of `take` is one thread.
6. `close` returns within its grace; unsettled deliveries go back to their queues.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.topology import QueueSpec

MAX_BODY_BYTES = 8 << 20

Headers = tuple[tuple[str, str], ...]


class LateBody(Protocol):
    """A body whose bytes are made when somebody asks for them, and are the same ever after."""

    def __bytes__(self) -> bytes: ...

    def may_be_over(self, max_bytes: int) -> bool:
        """Whether they could be more than that; says so without making them."""


Content = bytes | LateBody


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to publish to one queue; its bytes are `body`. `persistent` survives a broker
    restart.

    `instead` is the queue for it should `queue` not exist; "" is none. `headers` travel beside the
    body, and stay with it whatever queue it moves to.
    """

    queue: str
    content: Content
    persistent: bool = False
    content_type: str = "application/msgpack"
    correlation_id: str = ""
    reply_to: str = ""
    headers: Headers = ()
    instead: str = ""

    @property
    def body(self) -> bytes:
        return bytes(self.content)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as it was delivered; its bytes are `body`. `tag` is for the broker that delivered
    it alone.

    `handed_over_from` is the queue it was first published to, if its time limit or a reject moved
    it here, else "": `redelivered` then tells only what happened here. `sent_unix_us` is when
    its publisher handed it over, by that machine's clock, and `arrived_unix_us` when it came into
    this process; 0 for unknown.
    """

    queue: str
    content: Content
    redelivered: bool
    content_type: str
    correlation_id: str
    reply_to: str
    tag: Any = field(repr=False)
    headers: Headers = ()
    handed_over_from: str = ""
    sent_unix_us: int = 0
    arrived_unix_us: int = 0

    @property
    def body(self) -> bytes:
        return bytes(self.content)


def refuse_oversized(messages: Sequence[Outgoing]) -> None:
    """Raise `ValueError` naming the first message whose body is over `MAX_BODY_BYTES`."""
    for message in messages:
        if len(message.body) > MAX_BODY_BYTES:
            raise ValueError(
                f"the body for queue {message.queue} is {len(message.body)} bytes,"
                f" over the limit of {MAX_BODY_BYTES}"
            )


class Confirm(Protocol):
    """The fate of what one `publish` call sent."""

    def wait(self, timeout_s: float) -> None:
        """Return once every message is confirmed.

        Raises the first of `Unroutable`, `PublishRefused`, `ConfirmTimeout`, `BrokerUnavailable`.
        """


class Broker(Protocol):
    """A connection to queues."""

    def declare(self, queues: Sequence[QueueSpec]) -> None:
        """Create the queues that do not exist; remembered and repeated after a reconnect.

        Raises `ConfigError` when a queue of that name exists with other arguments.
        """

    def publish(self, messages: Sequence[Outgoing]) -> Confirm:
        """Send the messages in order, mandatory and in confirm mode. Raises `ValueError` for a body
        over `MAX_BODY_BYTES`. While the connection is down the messages are not buffered beyond
        the confirm's deadline."""

    def consume(self, queue: str, *, prefetch: int) -> None:
        """Start deliveries from a queue; remembered and repeated after a reconnect."""

    def cancel(self, queue: str) -> None:
        """Stop deliveries from a queue. What was delivered and not yet taken goes back."""

    def take(self, timeout_s: float) -> Delivery | None:
        """The next delivery, or None after `timeout_s`. Raises `BrokerUnavailable` only when the
        broker is closed for good."""

    def ack(self, delivery: Delivery) -> None: ...

    def reject(self, delivery: Delivery, *, requeue: bool) -> None: ...

    def depth(self, queue: str) -> int | None:
        """Messages ready in a queue, or None when it does not exist."""

    def connected(self) -> bool: ...

    def close(self, grace_s: float = 5.0) -> None: ...
