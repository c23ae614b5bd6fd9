"""One answer as it comes: the events of its choices in, pieces of text out. Knows no HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from services.gateway.event_ids import EventId, Shown
from services.gateway.note import Note, request_ids
from services.gateway.reader import Feed
from shared.api.ask import Kind
from shared.api.choice import Choice, Piece, Usage, failure_of, usage_of
from shared.api.errors import ApiError
from shared.producer import DEADLINE_GRACE_MS
from shared.store.ledger_types import FinalEvent
from shared.text.tokenizer import Tokenizer


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
            Choice(i, name, tokenizer, note.stops, note.call_finder()) for i, name in enumerate(ids)
        ]
        self._by_id = {choice.request_id: choice for choice in self.choices}
        self._feed = feed
        self._cut = cut
        self._failure: ApiError | None = None

    @property
    def kind(self) -> Kind:
        return self.note.kind

    @property
    def created_unix_s(self) -> int:
        return self.note.created_unix_s

    @property
    def logprobs(self) -> int | None:
        return self.note.logprobs

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
        return usage_of(self.choices, self.note.n)

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
                self._failure = self._failure or failure_of(self.note.kind, choice, event)
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
