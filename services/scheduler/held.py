"""A request in flight and its unacked messages. Knows no queue and no store."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared import codec
from shared.broker.base import Delivery
from shared.messages import Request
from shared.policy import Running


@dataclass(slots=True)
class Held:
    """Several messages, when a producer sent the request twice: each has its reply and its ack.

    `running` is what is known of it while it runs, None for one that was refused. It waits
    (`is_waiting`) until `kv_bytes` are free; the first `num_cached` positions of its prompt are
    rows that it shares with others. `is_batch` says that it came by the queue of batches,
    `is_new` that no step of it was ever sent, so that its first needs no new epoch. `next_count_s`
    is when its KV rows may be counted again, `sent_to` the worker that its last re-drive was meant
    for.
    `returned` holds messages that came again after a lost connection, while their first, stale
    delivery is still among `unanswered`: they are acked, and not answered a second time.
    `answered` are those whose reply is confirmed. They are acked at `settle_at_s`: before that the
    store may lose the end that they told of (None: none was told).
    `refused_since_s` says since when a reply queue is full, `retry_at_s` when to try again.
    """

    started_s: float
    running: Running | None = None
    is_waiting: bool = False
    is_batch: bool = False
    is_new: bool = False
    kv_bytes: int = 0
    num_cached: int = 0
    next_count_s: float = 0.0
    sent_to: str = ""
    unanswered: list[Delivery] = field(default_factory=list)
    answered: list[Delivery] = field(default_factory=list)
    returned: list[Delivery] = field(default_factory=list)
    refused_since_s: float | None = None
    retry_at_s: float = 0.0
    settle_at_s: float | None = None

    def add(self, delivery: Delivery) -> None:
        is_return = delivery.redelivered and any(
            _message(delivery) == _message(other) for other in (*self.unanswered, *self.answered)
        )
        if not is_return:
            self.retry_at_s = 0.0
        (self.returned if is_return else self.unanswered).append(delivery)

    def request(self) -> Request:
        """The request, read again from its first message."""
        delivery = self.deliveries[0]
        request = codec.decode(delivery.body, delivery.content_type)
        assert isinstance(request, Request), "only requests are held"
        return request

    @property
    def deliveries(self) -> list[Delivery]:
        return [*self.answered, *self.unanswered, *self.returned]

    @property
    def is_settling(self) -> bool:
        """It has ended and is answered; only its acks are left."""
        return self.settle_at_s is not None and not self.unanswered


def _message(delivery: Delivery) -> tuple[str, str, bytes]:
    return delivery.reply_to, delivery.correlation_id, delivery.body
