"""The messages that travel between processes, as values. Knows no wire format, queue or store.

Wire kinds are named by version (`step.v1`), never by class. Fields are only ever added, with
defaults. A message that exists is valid: each `__post_init__` raises `RequestError` or
`DecodeError` for what others could get wrong.

B batch, T positions in this message, D hidden_size, P prompt length in tokens.
Token positions count from 0: the prompt takes 0..P-1 and the first generated token position P.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from shared.errors import DecodeError, RequestError
from shared.logprobs import TokenLogprobs
from shared.sampling_params import MAX_SEED as MAX_SEED
from shared.sampling_params import MAX_TOKEN_ID as MAX_TOKEN_ID
from shared.sampling_params import MAX_TOKENS_LIMIT as MAX_TOKENS_LIMIT
from shared.sampling_params import SamplingParams as SamplingParams
from shared.text.response_format import ResponseFormat

MAX_LIST_LEN = 1 << 20  # token ids or chat messages of one request
MAX_UNIX_MS = 2**53 - 1
MAX_ROUTE_LEN = 1024
MAX_DRAFT_LEN = 64
# Becomes part of a queue's name, which AMQP limits to 255 bytes.
WORKER_ID_PATTERN = re.compile(r"[A-Za-z0-9._-]{0,128}\Z")
REQUEST_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}\Z")


class FinishReason(StrEnum):
    """Why a request ended (vLLM's names)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Request:
    """`request.v1`: what a producer asks for. Exactly one of prompt, messages, token_ids is given.

    `prompt` is raw text; `messages` go through the model's chat template; `token_ids` are taken as
    they are. `model` "" means the one model that is loaded. `deadline_unix_ms` 0 means none.
    `stream` asks for a `Token` in the reply queue for each token, before the `Reply`.
    `response_format` None is text.
    """

    request_id: str
    prompt: str | None = None
    messages: tuple[ChatMessage, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    model: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    deadline_unix_ms: int = 0
    stream: bool = False
    response_format: ResponseFormat | None = None

    def __post_init__(self) -> None:
        check_request_id(self.request_id)
        given = [n for n in ("prompt", "messages", "token_ids") if getattr(self, n) is not None]
        if len(given) != 1:
            raise RequestError(
                f"exactly one of prompt, messages, token_ids must be given, got {given or 'none'}"
            )
        if self.token_ids is not None and not self.token_ids:
            raise RequestError("token_ids must not be empty", param="token_ids")
        if self.messages is not None and not self.messages:
            raise RequestError("messages must not be empty", param="messages")
        if not 0 <= self.deadline_unix_ms <= MAX_UNIX_MS:
            raise RequestError(
                f"deadline_unix_ms must be in 0..2**53-1, got {self.deadline_unix_ms}",
                param="deadline_unix_ms",
            )
        for name in ("messages", "token_ids"):
            items = getattr(self, name) or ()
            if len(items) > MAX_LIST_LEN:
                raise RequestError(
                    f"{name} must be at most {MAX_LIST_LEN}, got {len(items)}", param=name
                )
        for number, token_id in enumerate(self.token_ids or ()):
            if not 0 <= token_id <= MAX_TOKEN_ID:
                raise RequestError(
                    f"token_ids[{number}] must be in 0..2**31-1, got {token_id!r:.80}",
                    param="token_ids",
                )
        _check_text("prompt", self.prompt or "")
        _check_text("model", self.model)
        for message in self.messages or ():
            _check_text("messages", message.role)
            _check_text("messages", message.content)


@dataclass(frozen=True, slots=True)
class Step:
    """`step.v1`: work for one layer group, for T consecutive positions of one request.

    For group 0 the tensors hold `token_ids` int32 (T,), for the others `hidden` (T, D), float32 or
    what the layout's wire makes of it (`shared.wire`), with more tensors beside it if need be.
    `position` is that of the first row. When `sample` is true the last row's logits give the token
    for position `position + T`; the prompt's last chunk and every decode step say so.
    `max_position` is the last position that a generated token may take. `deadline_unix_ms` 0 means
    none. `route[g]` is the worker that last computed group g of this request, "" or missing if none
    is known; it is a hint. `is_batch` says that nobody waits for the answer: others go first.

    With speculation it is a `step.v2`. `draft` are guessed tokens, whose rows follow one of a known
    token; each row is sampled as long as the token after it is the drafted one. `accepted` are the
    tokens right before `position` whose rows an earlier draft computed: they are in the caches of
    the workers on the route, and not in the store yet.

    `sampling` is what `SamplingParams.of_steps` leaves of the request's. If that is not all, the
    step is `shaped`: what is done to the logits first depends on the request's record and on the
    tokens so far, and whoever samples reads both in the ledger. Such a step, or one that draws in a
    way that is newer than `step.v2`, is a `step.v3`.
    """

    request_id: str
    model_id: str
    layout_id: str
    group: int
    epoch: int
    position: int
    sample: bool
    max_position: int
    tensors: Mapping[str, npt.NDArray[np.generic]]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...] = ()
    deadline_unix_ms: int = 0
    route: tuple[str, ...] = ()
    draft: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    is_batch: bool = False
    shaped: bool = False
    # Kept: they are asked for a dozen times in a step's turn.
    num_positions: int = field(init=False, repr=False, compare=False)  # T
    # The position after the last token that is known, not guessed: the first to be sampled.
    end_position: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not REQUEST_ID_PATTERN.match(self.request_id):
            raise DecodeError(f"step.v1 request_id is malformed: {self.request_id!r:.80}")
        numbers = (
            self.group, self.epoch, self.position, self.max_position, self.deadline_unix_ms
        )  # fmt: skip
        if not (min(numbers) >= 0 and max(numbers) < 2**53):
            raise DecodeError(f"step.v1 has a number out of range: {numbers}")
        if self.sampling.seed is None:
            raise DecodeError("step.v1 sampling.seed must be given")
        if not self.tensors:
            raise DecodeError("step.v1 carries no tensor")
        sizes = {t.shape[0] if t.ndim else 0 for t in self.tensors.values()}
        if len(sizes) != 1:
            raise DecodeError("step.v1 tensors disagree on the number of positions")
        num_positions = sizes.pop()
        if num_positions == 0:
            raise DecodeError("step.v1 tensors are empty")
        object.__setattr__(self, "num_positions", num_positions)
        end_position = self.position + num_positions - len(self.draft)
        object.__setattr__(self, "end_position", end_position)
        if len(self.route) > MAX_ROUTE_LEN:
            raise DecodeError(f"step.v1 route must be at most {MAX_ROUTE_LEN}")
        for worker_id in self.route:
            if not WORKER_ID_PATTERN.match(worker_id):
                raise DecodeError(f"step.v1 route holds no worker id: {worker_id!r:.80}")
        if self.draft or self.accepted:
            self._check_speculation()

    def _check_speculation(self) -> None:
        if max(len(self.draft), len(self.accepted)) > MAX_DRAFT_LEN:
            raise DecodeError(f"step.v2 draft and accepted must be at most {MAX_DRAFT_LEN}")
        if self.draft and not (self.sample and self.num_positions == 1 + len(self.draft)):
            raise DecodeError(
                f"step.v2 with a draft of {len(self.draft)} must be sampled and hold one position "
                f"more, got {self.num_positions}"
            )
        if len(self.accepted) > self.position:
            raise DecodeError(f"step.v2 accepted holds more than the {self.position} before it")

    def then(
        self,
        *,
        group: int,
        position: int,
        sample: bool,
        tensors: Mapping[str, npt.NDArray[np.generic]],
        draft: tuple[int, ...],
        accepted: tuple[int, ...],
        route: tuple[str, ...] | None = None,
    ) -> Step:
        """Other work of the same request and epoch, four times as fast as `replace`."""
        return Step(
            self.request_id,
            self.model_id,
            self.layout_id,
            group,
            self.epoch,
            position,
            sample,
            self.max_position,
            tensors,
            self.sampling,
            self.stop_token_ids,
            self.deadline_unix_ms,
            self.route if route is None else route,
            draft,
            accepted,
            self.is_batch,
            self.shaped,
        )


@dataclass(frozen=True, slots=True)
class Reply:
    """`reply.v1`: the final answer, sent to a request's `reply_to` queue.

    The first `num_cached_tokens` of the prompt had been computed for others before. `error_code` is
    an `ErrorCode`, or one of a later version; `error_param` the field of the request at fault.
    `logprobs` are those of each token, None if they were not asked for or would not fit into a
    message.
    """

    request_id: str
    finish_reason: FinishReason
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    error: str = ""
    num_cached_tokens: int = 0
    error_code: str = ""
    error_param: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Token:
    """`token.v1`: token number `index`, from 0, of an answer that is under way.

    `text` is what it completes, "" within a character or for a special token; those of all tokens
    join to the reply's text, but for a character that is never completed. A token may be told of
    more than once, always alike, and its message may be lost: the `Reply` is what counts.
    """

    request_id: str
    index: int
    token_id: int
    text: str
    logprobs: TokenLogprobs | None = None


Message = Request | Step | Reply | Token


def check_request_id(request_id: str) -> None:
    """Raise `RequestError` unless the id is 1-64 of [A-Za-z0-9_-], not starting with - or _."""
    if not REQUEST_ID_PATTERN.match(request_id):
        raise RequestError(
            f"request_id must be 1-64 letters, digits, '-' or '_', got {request_id!r:.80}",
            param="request_id",
        )


def _check_text(name: str, text: str) -> None:
    """Raise `RequestError` for what UTF-8 cannot carry, such as bytes that Python escaped."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{name} is no valid Unicode: a lone surrogate at {error.start}",
                remedy="give text in UTF-8",
                param=name,
            ) from error
