"""The answer of one line while it runs: events of its requests in, its output line out. Pure."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from services.batch.lines import Line
from shared.api.ask import Kind
from shared.api.choice import Choice, Piece, Usage, failure_of, usage_of
from shared.api.documents import whole_document
from shared.api.errors import ApiError
from shared.api.model import ApiModel
from shared.api.tools import Form, call_finder
from shared.messages import Request
from shared.store.ledger_base import START
from shared.store.ledger_types import Event, FinalEvent, RequestState
from shared.text.tokenizer import Tokenizer


class Part:
    """One request of a line and its text. `seen`: the ledger has known it, already before this run
    if it `is_known`. `after` is its last event that was taken, `num_tokens` are those that came
    since it was first looked at. `has_ended` is what the ledger says: events may be left to read.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        tokenizer: Tokenizer,
        stops: tuple[str, ...],
        form: Form,
        *,
        is_known: bool,
    ) -> None:
        self.request = request
        self.may_be_cut = bool(stops or form.calls)
        self.seen = self._is_known = is_known
        self.num_tokens = 0
        self._first_position: int | None = None
        self._number = number
        self._tokenizer, self._stops, self._form = tokenizer, stops, form
        self.forget()

    @property
    def num_new_tokens(self) -> int:
        """Those that were generated for this run, once it has ended."""
        final = self.choice.final
        return self.num_tokens if self._is_known or final is None else final.num_generated

    def forget(self) -> None:
        """The store has lost it: it begins again."""
        form = self._form
        self.choice = Choice(
            self._number,
            self.request.request_id,
            self._tokenizer,
            self._stops,
            call_finder(form.calls, form.functions, parallel=form.parallel),
        )
        self.after = START
        self.piece = Piece(self._number)
        self.has_ended = False

    def look(self, state: RequestState) -> None:
        self.seen = True
        if self._first_position is None:
            self._first_position = state.committed_position
        self.num_tokens = state.committed_position - self._first_position
        self.has_ended = state.finish_reason is not None

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            self.after = event.event_id
            if isinstance(event, FinalEvent):
                self.piece.text += self.choice.end(event)
            else:
                self.piece.text += self.choice.take(event)
            self.piece.calls += self.choice.parts
            self.piece.tokens += self.choice.shown


class LineAnswer:
    """All answers that a line asks for. `known` are the requests that the ledger knows already."""

    def __init__(self, line: Line, model: ApiModel, known: Iterable[str] = ()) -> None:
        assert line.ask is not None, "a line that cannot be served has no answer"
        self.line = line
        self.kind: Kind = line.ask.kind
        self.created_unix_s = int(time.time())
        ids = frozenset(known)
        self.parts = [
            Part(
                request,
                number,
                model.tokenizer,
                line.stops,
                line.ask.form,
                is_known=request.request_id in ids,
            )
            for number, request in enumerate(line.requests)
        ]
        self._model = model
        self._n = line.ask.n

    @property
    def completion_id(self) -> str:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return f"{prefix}-{self.line.entry.request_id}"

    @property
    def choices(self) -> list[Choice]:
        return [part.choice for part in self.parts]

    @property
    def logprobs(self) -> int | None:
        return self.line.requests[0].sampling.logprobs

    @property
    def usage(self) -> Usage | None:
        return usage_of(self.choices, self._n)

    @property
    def has_ended(self) -> bool:
        return all(part.has_ended for part in self.parts)

    @property
    def num_tokens(self) -> int:
        return sum(part.num_tokens for part in self.parts)

    @property
    def num_new_tokens(self) -> int:
        return sum(part.num_new_tokens for part in self.parts)

    def output_line(self) -> dict[str, Any]:
        """Once the last event of every part was taken."""
        for choice in self.choices:
            if choice.final is None:
                error = ApiError(500, "tokens of the answer were lost", code="tokens_lost")
                return error_line(self.line, error)
            failure = failure_of(self.kind, choice, choice.final)
            if failure is not None:
                return error_line(self.line, failure)
        body = json.loads(whole_document(self, [p.piece for p in self.parts], self._model))
        return _line(self.line, response=(200, body))


def error_line(line: Line, error: ApiError) -> dict[str, Any]:
    """The output line that tells of an error: as a response where the request is at fault."""
    if line.entry.custom_id is None:
        return _line(line, error=("invalid_line", error.message))
    if error.status >= 500 or error.status == 410:
        return _line(line, error=(error.code or "failed", error.message))
    return _line(line, response=(error.status, error.body()))


def _line(
    line: Line,
    *,
    response: tuple[int, dict[str, Any]] | None = None,
    error: tuple[str, str] | None = None,
) -> dict[str, Any]:
    request_id = line.entry.request_id
    return {
        "id": request_id,
        "custom_id": line.entry.custom_id,
        "response": response
        and {"status_code": response[0], "request_id": request_id, "body": response[1]},
        "error": error and {"code": error[0], "message": error[1]},
    }
