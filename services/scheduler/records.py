"""Between a plan and its record in the ledger. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from services.scheduler.admission import Plan
from shared import codec
from shared.errors import ErrorCode
from shared.messages import FinishReason, Request, SamplingParams
from shared.store.ledger_types import LedgerRecord
from shared.topology import Layout


def content_of(request: Request) -> str:
    """What tells a request from another one under its id: a digest of all that its answer depends
    on. The same in msgpack and JSON; how long its sender waits, and for what, is not in it."""
    asked = replace(request, deadline_unix_ms=0, stream=False)
    return hashlib.blake2b(codec.encode(asked), digest_size=16).hexdigest()


def record_of(
    plan: Plan, layout: Layout, *, created_unix_ms: int, content: str = ""
) -> LedgerRecord:
    """The record that admits a plan, made from a request of this `content`."""
    return LedgerRecord(
        request_id=plan.request_id,
        model_id=layout.model_id,
        layout_id=layout.layout_id,
        prompt_token_ids=plan.token_ids,
        sampling=plan.sampling,
        max_position=plan.max_position,
        stop_token_ids=plan.stop_token_ids,
        deadline_unix_ms=plan.deadline_unix_ms,
        created_unix_ms=created_unix_ms,
        response_format=plan.response_format,
        content=content,
    )


def plan_of(record: LedgerRecord) -> Plan:
    """The plan that a record admitted, with the seed that was drawn for it."""
    return Plan(
        request_id=record.request_id,
        token_ids=record.prompt_token_ids,
        sampling=record.sampling,
        max_position=record.max_position,
        stop_token_ids=record.stop_token_ids,
        deadline_unix_ms=record.deadline_unix_ms,
        response_format=record.response_format,
    )


def refusal_of(
    request_id: str,
    layout: Layout,
    error: str,
    *,
    code: ErrorCode,
    param: str = "",
    created_unix_ms: int,
) -> LedgerRecord:
    """The record of a request that was never admitted, and why."""
    return LedgerRecord(
        request_id=request_id,
        model_id=layout.model_id,
        layout_id=layout.layout_id,
        prompt_token_ids=(),
        sampling=SamplingParams(),
        max_position=0,
        created_unix_ms=created_unix_ms,
        finish_reason=FinishReason.ERROR,
        error=error,
        error_code=code,
        error_param=param,
    )
