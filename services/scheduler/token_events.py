"""Tells of tokens in the reply queues of those who asked for them. Knows no plan and no step.

A best effort beside the reply, which is what counts: nothing is confirmed, and what goes missing
with a connection or into a full queue is not sent again. Another scheduler that takes a request
over tells of all its tokens once more, in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from services.scheduler.replies import answer_to
from shared.broker.base import Broker, Delivery
from shared.errors import PermanentError
from shared.messages import Token
from shared.store.ledger_base import START, RequestLedger
from shared.store.ledger_types import TokenEvent
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer

log = structlog.get_logger()


@dataclass(slots=True)
class _Listener:
    """One who asked: a request message, and how far it was told."""

    delivery: Delivery
    detokenizer: Detokenizer
    after: str = START
    num_told: int = 0
    position: int = -1


class TokenEvents:
    def __init__(self, broker: Broker, ledger: RequestLedger, tokenizer: Tokenizer) -> None:
        self._broker = broker
        self._ledger = ledger
        self._tokenizer = tokenizer
        self._listeners: dict[str, list[_Listener]] = {}

    def follow(self, request_id: str, delivery: Delivery) -> None:
        """Tell the sender of a request message of its tokens, from the first on.

        A message that came twice is told once.
        """
        listeners = self._listeners.setdefault(request_id, [])
        if delivery.reply_to and not any(
            (delivery.reply_to, delivery.correlation_id)
            == (other.delivery.reply_to, other.delivery.correlation_id)
            for other in listeners
        ):
            listeners.append(_Listener(delivery, Detokenizer(self._tokenizer)))

    def tell(self, request_id: str, committed_position: int) -> None:
        """Send what is new up to a position. Costs nothing when there is nothing new."""
        for listener in self._listeners.get(request_id, ()):
            if listener.position < committed_position:
                try:
                    self._send(request_id, listener)
                except PermanentError as error:  # its answer tells of it
                    log.warning("token_events_lost", request_id=request_id, reason=str(error))
                listener.position = committed_position

    def end(self, request_id: str, committed_position: int) -> None:
        """Send the rest; the reply comes next."""
        self.tell(request_id, committed_position)
        self._listeners.pop(request_id, None)

    def _send(self, request_id: str, listener: _Listener) -> None:
        while events := self._ledger.events(request_id, listener.after):
            tokens = [event for event in events if isinstance(event, TokenEvent)]
            messages = []
            for event in tokens:
                text = listener.detokenizer.feed([event.token_id])
                token = Token(request_id, listener.num_told, event.token_id, text, event.logprobs)
                messages.append(answer_to(listener.delivery, token, persistent=False))
                listener.num_told += 1
            if messages:
                self._broker.publish(messages)
            listener.after = events[-1].event_id
