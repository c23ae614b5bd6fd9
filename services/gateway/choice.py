"""One choice of an answer: events in, text out. Knows no HTTP, queue or store.

What it shows depends on its tokens alone, one after the other: whoever reads them again shows the
same, from any of them on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.gateway.stops import StopMatcher
from shared.messages import FinishReason
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.text.detokenizer import Detokenizer
from shared.text.logprobs import ShownToken
from shared.text.tokenizer import Tokenizer
from shared.text.tool_calls import CallPart, ForcedCalls, FreeCalls


class Choice:
    """`num_tokens` are those taken, with the one that completed a stop string and none after it.

    `finish_reason` None: it still runs. `final` is the end of its request, which may come later.
    Calls of functions are found by `calls`, and then no part of the text; `parts` are those that
    the last call showed.
    `shown` are the tokens of whose text the last call showed the first character, if their request
    asked for log probabilities.
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
        self.parts: list[CallPart] = []
        self.shown: list[ShownToken] = []
        self._hidden: deque[ShownToken] = deque()  # of which no text was shown yet
        self._ready: list[ShownToken] = []  # to be shown with the next text or call
        self._num_chars = 0  # that came of the tokens
        self._num_shown = 0

    @property
    def was_cut(self) -> bool:
        """A stop string has ended it, or the only call it may make; its request may run on."""
        return self._stops.has_stopped or (self._calls is not None and self._calls.is_done)

    def take(self, event: TokenEvent) -> str:
        """The text that a token completes; "" while a character or a stop string is open."""
        self.shown, self.parts = [], []
        if self.finish_reason is not None:
            return ""
        self.num_tokens += 1
        if event.logprobs is not None:
            self._hidden.append(ShownToken(event.token_id, self._num_chars, event.logprobs))
        text = self._detokenizer.feed([event.token_id])
        self._num_chars += len(text)
        text = self._show(self._stops.feed(text), at_end=False)
        if self.was_cut:
            self.finish_reason = self._stopped
        return text

    def end(self, event: FinalEvent) -> str:
        """The rest of the text. One that failed or was cancelled has no finish reason."""
        self.final = event
        self.shown, self.parts = [], []
        if self.finish_reason is not None:
            return ""
        rest = self._stops.feed(self._detokenizer.finish()) + self._stops.finish()
        rest = self._show(rest, at_end=True)
        if self._stops.has_stopped or event.finish_reason is FinishReason.STOP:
            self.finish_reason = self._stopped
        elif event.finish_reason is FinishReason.LENGTH:
            self.finish_reason = "length"
        return rest

    @property
    def _stopped(self) -> str:
        return "tool_calls" if self._calls is not None and self._calls.num_calls else "stop"

    def _show(self, text: str, *, at_end: bool) -> str:
        """What of a text is shown: without calls, and without what may become one."""
        self._num_shown += len(text)
        while self._hidden and self._hidden[0].offset < self._num_shown:
            self._ready.append(self._hidden.popleft())
        if self._calls is not None:
            text, self.parts = self._calls.feed(text)
            if at_end or self.was_cut:
                text += self._calls.finish()
        if text or self.parts or at_end or self.was_cut:
            self.shown, self._ready = self._ready, []
        return text
