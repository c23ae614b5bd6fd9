"""One request as the ledger in this process holds it. Knows no other request, clock or lock."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field, replace

from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason
from shared.store.ledger_base import MAX_ERROR_CHARS
from shared.store.ledger_types import Event, FinalEvent, LedgerRecord, TokenEvent

EventId = tuple[int, int]  # position, number


@dataclass(slots=True, eq=False)
class Entry:
    """One request: what it began with and what changed since.

    `admitted` has no tokens: they are in `prompt`, in a tenth of the memory. `first` is where the
    last commit began: what comes again begins there. `logprobs` are packed, of each generated token
    or of none.
    """

    admitted: LedgerRecord
    prompt: array[int]
    generated: array[int]
    epoch: int
    first: int
    finish_reason: FinishReason | None
    error: str
    error_code: str
    num_cached: int
    expires_at_s: float
    final: FinalEvent | None = None
    final_id: EventId = (0, 0)
    logprobs: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, record: LedgerRecord, *, expires_at_s: float) -> Entry:
        return cls(
            admitted=replace(record, prompt_token_ids=()),
            prompt=array("i", record.prompt_token_ids),
            generated=array("i"),
            epoch=record.epoch,
            first=record.num_prompt_tokens - 1,
            finish_reason=record.finish_reason,
            error=record.error[:MAX_ERROR_CHARS],
            error_code=record.error_code,
            num_cached=record.num_cached,
            expires_at_s=expires_at_s,
        )

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def committed(self) -> int:
        """The position of the last token that is known."""
        return len(self.prompt) + len(self.generated) - 1

    def as_record(self) -> LedgerRecord:
        return replace(
            self.admitted,
            prompt_token_ids=tuple(self.prompt),
            epoch=self.epoch,
            committed_position=self.committed,
            finish_reason=self.finish_reason,
            error=self.error,
            error_code=self.error_code,
            num_cached=self.num_cached,
        )

    def events(self, after: EventId, count: int) -> list[Event]:
        """Up to `count` events after the one with the id `after`."""
        start = max(0, after[0] + 1 - self.num_prompt)  # token ids end in 0: none lies between
        events: list[Event] = [
            TokenEvent(event_text((position, 0)), position, token_id, self._logprobs(position))
            for position, token_id in enumerate(
                self.generated[start : start + count], start + self.num_prompt
            )
        ]
        if self.final is not None and len(events) < count and self.final_id > after:
            events.append(self.final)
        return events

    def _logprobs(self, position: int) -> TokenLogprobs | None:
        if not self.logprobs:
            return None
        return TokenLogprobs(self.logprobs[position - self.num_prompt])


def event_text(event_id: EventId) -> str:
    return f"{event_id[0]}-{event_id[1]}"
