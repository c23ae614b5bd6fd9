"""One choice of an answer: events in, text out. Knows no HTTP, queue or store.

What it shows depends on its tokens alone, one after the other: whoever reads them again shows the
same, from any of them on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.api.ask import Kind
from shared.api.errors import ApiError, ended_error
from shared.api.stops import StopMatcher
from shared.messages import FinishReason
from shared.store.ledger_types import FinalEvent, TokenEvent
from shared.text.detokenizer import Detokenizer
from shared.text.logprobs import ShownToken
from shared.text.tokenizer import Tokenizer
from shared.text.tool_calls import CallPart, ForcedCalls, FreeCalls


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of each prompt once, whatever `n`; those of it that were cached; those generated."""

    num_prompt: int
    num_cached: int
    num_generated: int


@dataclass(slots=True)
class Piece:
    """Text and calls of one choice up to its `num_tokens`th token, and its end if it was reached.

    `tokens` are those that begin in the text, if log probabilities were asked for.
    `event_id` says how far a reader is who has seen it and all before it.
    """

    index: int
    num_tokens: int = 0
    text: str = ""
    finish_reason: str | None = None
    event_id: str = ""
    tokens: list[ShownToken] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)


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


def usage_of(choices: Sequence[Choice], n: int) -> Usage | None:
    """Of the choices of an answer, `n` a prompt; None while one of them runs, perhaps cut."""
    finals = [choice.final for choice in choices if choice.final is not None]
    if len(finals) < len(choices):
        return None
    firsts = finals[::n]
    return Usage(
        num_prompt=sum(final.num_prompt_tokens for final in firsts),
        num_cached=sum(final.num_cached for final in firsts),
        num_generated=sum(choice.num_tokens for choice in choices),
    )


def failure_of(kind: Kind, choice: Choice, event: FinalEvent) -> ApiError | None:
    """What an end means that is none of a text."""
    if choice.was_cut:
        return None
    if event.finish_reason is FinishReason.ERROR:
        # What was submitted are token ids, whatever the client sent.
        given = "messages" if kind == "chat" else "prompt"
        param = given if event.error_param == "token_ids" else event.error_param
        return ended_error(event.error_code, event.error, param)
    if choice.finish_reason is None:
        # Not 409, which OpenAI's clients take for an invitation to ask again.
        return ApiError(410, "the request was cancelled", code="cancelled")
    if choice.num_tokens != event.num_generated:
        return ApiError(500, "tokens of the answer were lost", code="tokens_lost")
    return None
