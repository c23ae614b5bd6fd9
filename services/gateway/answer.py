"""One answer as it comes: the events of its choices in, pieces of text out. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.gateway.choice import Choice
from services.gateway.errors import ApiError
from services.gateway.event_ids import EventId, Shown
from services.gateway.note import Note, request_ids
from services.gateway.reader import Feed
from shared.messages import FinishReason
from shared.producer import DEADLINE_GRACE_MS
from shared.store.ledger_types import FinalEvent
from shared.text.logprobs import ShownToken
from shared.text.tokenizer import Tokenizer
from shared.text.tool_calls import MAX_FREE_CALLS, CallPart, ForcedCalls, FreeCalls


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


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of each prompt once, whatever `n`; those of it that were cached; those generated."""

    num_prompt: int
    num_cached: int
    num_generated: int


class Answer:
    """Follows an answer from its first token on; what `shown` says was shown is not shown again.

    `cut(request_id)` is called for a request whose text a stop string has ended. `reader` is the
    name under which it was picked up.
    """

    def __init__(
        self,
        completion_id: str,
        note: Note,
        *,
        tokenizer: Tokenizer,
        feed: Feed,
        cut: Callable[[str], None],
        shown: Sequence[Shown] = (),
        reader: str = "",
    ) -> None:
        self.completion_id = completion_id
        self.note = note
        self.reader = reader
        self.shown = list(shown) or [Shown()] * note.num_choices
        ids = request_ids(completion_id, note.num_choices)
        self.choices = [
            Choice(i, name, tokenizer, note.stops, _call_finder(note)) for i, name in enumerate(ids)
        ]
        self._by_id = {choice.request_id: choice for choice in self.choices}
        self._feed = feed
        self._cut = cut
        self._failure: ApiError | None = None

    @property
    def has_failed(self) -> bool:
        """What `next` raises now."""
        return self._failure is not None

    @property
    def has_ended(self) -> bool:
        """Every choice has all of its text, and none has failed."""
        return not self.has_failed and all(
            choice.finish_reason is not None for choice in self.choices
        )

    @property
    def usage(self) -> Usage | None:
        """None while a request runs, perhaps one that was cut."""
        finals = [choice.final for choice in self.choices if choice.final is not None]
        if len(finals) < len(self.choices):
            return None
        firsts = finals[:: self.note.n]
        return Usage(
            num_prompt=sum(final.num_prompt_tokens for final in firsts),
            num_cached=sum(final.num_cached for final in firsts),
            num_generated=sum(choice.num_tokens for choice in self.choices),
        )

    async def next(self, timeout_s: float) -> list[Piece]:
        """Pieces that are new, one a choice at most; [] if nothing comes within `timeout_s`.

        Raises `ApiError` when one of the choices has failed, was cancelled, or does not end.
        """
        if self._failure is not None:
            raise self._failure
        events = await self._feed.next(timeout_s)
        if not events and time.time_ns() // 1_000_000 > (
            self.note.deadline_unix_ms + DEADLINE_GRACE_MS
        ):
            raise ApiError(504, "the request did not end by its deadline", code="timeout")
        pieces: dict[int, Piece] = {}
        for request_id, event in events:
            choice = self._by_id[request_id]
            had_ended = choice.finish_reason is not None
            if isinstance(event, FinalEvent):
                text = choice.end(event)
                self._failure = self._failure or _failure_of(choice, event)
            else:
                text = choice.take(event)
                if choice.was_cut and not had_ended:
                    self._cut(request_id)
            has_ended = choice.finish_reason is not None
            shown = self.shown[choice.index]
            if isinstance(event, FinalEvent) and not has_ended:
                continue
            if shown.is_finished or (choice.num_tokens <= shown.num_tokens and not has_ended):
                continue
            if choice.num_tokens <= shown.num_tokens and not isinstance(event, FinalEvent):
                text, choice.parts, choice.shown = "", [], []  # it was shown, its end was not
            piece = pieces.setdefault(choice.index, Piece(choice.index))
            piece.text += text
            piece.calls += choice.parts
            piece.tokens += choice.shown
            piece.num_tokens = choice.num_tokens
            piece.finish_reason = choice.finish_reason
        new = [p for p in pieces.values() if self._note_shown(p)]
        if self._failure is not None and not new:
            raise self._failure
        return new  # what came before the failure is shown before it

    def open_choices(self) -> list[Piece]:
        """An empty piece of each choice of which nothing was shown yet."""
        fresh = [Piece(i) for i, shown in enumerate(self.shown) if shown.num_tokens < 0]
        for piece in fresh:
            self.shown[piece.index] = Shown(0)
            piece.event_id = self.event_id()
        return fresh

    def event_id(self, tail: str = "") -> str:
        """How far the reader is; `tail` as in `EventId`."""
        return str(EventId(self.completion_id, tuple(self.shown), tail))

    def close(self) -> None:
        self._feed.close()

    def _note_shown(self, piece: Piece) -> bool:
        """Whether the piece shows anything."""
        has_ended = piece.finish_reason is not None
        if self.shown[piece.index].is_finished or not (piece.text or piece.calls or has_ended):
            return False
        self.shown[piece.index] = Shown(piece.num_tokens, has_ended)
        piece.event_id = self.event_id()
        return True


def _call_finder(note: Note) -> FreeCalls | ForcedCalls | None:
    match note.calls:
        case "free":
            return FreeCalls(note.functions, max_calls=MAX_FREE_CALLS if note.parallel else 1)
        case "forced":
            return ForcedCalls(note.functions)
        case _:
            return None


def _failure_of(choice: Choice, event: FinalEvent) -> ApiError | None:
    """What an end means that is none of a text."""
    if choice.was_cut:
        return None
    if event.finish_reason is FinishReason.ERROR:
        return ApiError(500, event.error or "the request failed", code="generation_failed")
    if choice.finish_reason is None:
        # Not 409, which OpenAI's clients take for an invitation to ask again.
        return ApiError(410, "the request was cancelled", code="cancelled")
    if choice.num_tokens != event.num_generated:
        return ApiError(500, "tokens of the answer were lost", code="tokens_lost")
    return None
