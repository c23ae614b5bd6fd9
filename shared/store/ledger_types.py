"""What the ledger holds and answers, as values. Knows no key and no connection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason, SamplingParams
from shared.text.response_format import ResponseFormat


@dataclass(frozen=True, slots=True)
class LedgerRecord:
    """What is remembered of a request.

    P prompt length. `sampling.seed` is given: a repeat draws the same tokens. `max_position` is the
    last position that a generated token may take. `committed_position` is that of the last token
    that is known, P-1 until the first is generated (-1 stands for that in a new record).
    `finish_reason` None means that it still runs. The rows of the first `num_cached` positions were
    there when it started: it shares them with other requests. `deadline_unix_ms` 0 means none.
    `error` is for people; `error_code`, an `ErrorCode`, and `error_param`, the field of the request
    at fault, are for programs.
    `response_format` is what the answer must be, None for text.
    `content` tells its question from another one under its id; "" tells nothing.
    """

    request_id: str
    model_id: str
    layout_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_position: int
    stop_token_ids: tuple[int, ...] = ()
    epoch: int = 0
    created_unix_ms: int = 0
    deadline_unix_ms: int = 0
    committed_position: int = -1
    finish_reason: FinishReason | None = None
    error: str = ""
    num_cached: int = 0
    error_code: str = ""
    error_param: str = ""
    response_format: ResponseFormat | None = None
    content: str = ""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return max(0, self.committed_position + 1 - self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class RequestState:
    """How far a request has come."""

    epoch: int
    committed_position: int
    finish_reason: FinishReason | None
    error: str


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens of the positions from `position` on. The request ends with the last one if `finish`
    says so. `logprobs` are those of each token, or () for a request that did not ask."""

    request_id: str
    epoch: int
    position: int
    token_ids: Sequence[int]
    finish: FinishReason | None = None
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """The tokens are in the ledger, by this call."""


@dataclass(frozen=True, slots=True)
class AlreadyCommitted:
    """The last commit began at this position; `token_ids` are the tokens that won."""

    token_ids: tuple[int, ...]
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Stale:
    """Later steps have committed."""


@dataclass(frozen=True, slots=True)
class Gap:
    """An earlier position is not committed yet; the last one that is."""

    committed_position: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """The request has moved to another epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The request has ended."""

    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Unknown:
    """The ledger has no such request."""


CommitResult = Committed | AlreadyCommitted | Stale | Gap | Fenced | Finished | Unknown


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A generated token. `event_id` orders the events of a request and resumes their reading."""

    event_id: str
    position: int
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class FinalEvent:
    """The end of a request, its last event. `num_cached` and the error as in `LedgerRecord`."""

    event_id: str
    finish_reason: FinishReason
    error: str
    num_prompt_tokens: int
    num_generated: int
    num_cached: int = 0
    error_code: str = ""
    error_param: str = ""


Event = TokenEvent | FinalEvent
