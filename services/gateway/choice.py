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
from shared.text.tool_calls import CallPart, ForcedCalls, FreeCalls


class Choice:
    """`num_tokens` are those taken, with the one that completed a stop string and none after it.

    `finish_reason` None: it still runs. `final` is the end of its request, which may come later.
    Calls of functions are found by `calls`, and then no part of the text.
    """

    def __init__(
        self,
        index: int,
        request_id: str,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        calls: FreeCalls | ForcedCalls | None = None,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.final: FinalEvent | None = None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stops)
        self._calls = calls
        self._parts: list[CallPart] = []

    @property
    def was_cut(self) -> bool:
        """A stop string has ended it, or the only call it may make; its request may run on."""
        return self._stops.has_stopped or (self._calls is not None and self._calls.is_done)

    def take_calls(self) -> list[CallPart]:
        """The parts of calls that came with what was taken since this was last asked."""
        parts, self._parts = self._parts, []
        return parts

    def take(self, event: TokenEvent) -> str:
        """The text that a token completes; "" while a character or a stop string is open."""
        if self.finish_reason is not None:
            return ""
        self.num_tokens += 1
        text = self._without_calls(self._stops.feed(self._detokenizer.feed([event.token_id])))
        if self.was_cut:
            text += self._rest_of_calls()
            self.finish_reason = self._stopped
        return text

    def end(self, event: FinalEvent) -> str:
        """The rest of the text. One that failed or was cancelled has no finish reason."""
        self.final = event
        if self.finish_reason is not None:
            return ""
        rest = self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        rest = self._without_calls(rest) + self._rest_of_calls()
        if self._stops.has_stopped or event.finish_reason is FinishReason.STOP:
            self.finish_reason = self._stopped
        elif event.finish_reason is FinishReason.LENGTH:
            self.finish_reason = "length"
        return rest

    @property
    def _stopped(self) -> str:
        return "tool_calls" if self._calls is not None and self._calls.num_calls else "stop"

    def _without_calls(self, text: str) -> str:
        if self._calls is None:
            return text
        text, parts = self._calls.feed(text)
        self._parts += parts
        return text

    def _rest_of_calls(self) -> str:
        return "" if self._calls is None else self._calls.finish()
