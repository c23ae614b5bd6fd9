"""One choice of an answer: events in, text out. Knows no HTTP, queue or store.

What it shows depends on its tokens alone, one after the other: whoever reads them again shows the
same, from any of them on.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.gateway.stops import StopMatcher
from shared.messages import FinishReason
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.text.detokenizer import Detokenizer
from shared.text.tokenizer import Tokenizer


class Choice:
    """`num_tokens` are those taken, with the one that completed a stop string and none after it.

    `finish_reason` None: it still runs. `final` is the end of its request, which may come later.
    """

    def __init__(
        self, index: int, request_id: str, tokenizer: Tokenizer, stops: Sequence[str]
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.final: FinalEvent | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)

    @property
    def was_cut(self) -> bool:
        """A stop string has ended it; its request may run on."""
        return self._stops.has_stopped

    def take(self, event: TokenEvent) -> str:
        """The text that a token completes; "" while a character or a stop string is open."""
        if self.finish_reason is not None:
            return ""
        self.num_tokens += 1
        text = self._stops.feed(self._detokenizer.feed([event.token_id]))
        if self._stops.has_stopped:
            self.finish_reason = "stop"
        return text

    def end(self, event: FinalEvent) -> str:
        """The rest of the text. One that failed or was cancelled has no finish reason."""
        self.final = event
        if self.finish_reason is not None:
            return ""
        rest = self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        if self._stops.has_stopped or event.finish_reason is FinishReason.STOP:
            self.finish_reason = "stop"
        elif event.finish_reason is FinishReason.LENGTH:
            self.finish_reason = "length"
        return rest
