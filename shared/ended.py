"""What is told of a request at its end: its reply, its record if it never ran, or that it has not
ended. Pure, but for the time."""

from __future__ import annotations

import time

from shared.errors import StoreDamaged, TransientError
from shared.messages import FinishReason, Reply, SamplingParams
from shared.store.ledger_types import FinalEvent, LedgerRecord, TokenEvent
from shared.text.tokenizer import Tokenizer


def aborted_record(request_id: str) -> LedgerRecord:
    """The record of a request that was cancelled before anybody looked at it."""
    return LedgerRecord(
        request_id=request_id,
        model_id="",
        layout_id="",
        prompt_token_ids=(),
        sampling=SamplingParams(),
        max_position=0,
        created_unix_ms=time.time_ns() // 1_000_000,
        finish_reason=FinishReason.ABORT,
    )


def reply_of(
    request_id: str, end: FinalEvent, tokens: list[TokenEvent], tokenizer: Tokenizer
) -> Reply:
    """The whole answer, of its events. Raises `StoreDamaged` when some of its tokens are lost."""
    token_ids = tuple(event.token_id for event in tokens)
    logprobs = tuple(event.logprobs for event in tokens if event.logprobs is not None)
    if end.num_generated != len(token_ids):
        raise StoreDamaged(
            f"the store holds {len(token_ids)} of the {end.num_generated} tokens of "
            f"request {request_id}"
        )
    return Reply(
        request_id=request_id,
        finish_reason=end.finish_reason,
        text=tokenizer.decode(token_ids, skip_special=True),
        token_ids=token_ids,
        num_prompt_tokens=end.num_prompt_tokens,
        error=end.error,
        num_cached_tokens=end.num_cached,
        error_code=end.error_code,
        error_param=end.error_param,
        logprobs=logprobs if logprobs and len(logprobs) == len(token_ids) else None,
    )


def unfinished(request_id: str, num_tokens: int, *, is_known: bool) -> TransientError:
    """Why there is no reply yet."""
    if is_known:
        return TransientError(f"request {request_id} runs, and has {num_tokens} tokens so far")
    return TransientError(
        f"request {request_id} is not known: it waits in its queue, or ended long ago"
    )
