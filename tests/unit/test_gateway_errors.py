"""What a client hears of every reason for which a request may fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from services.gateway.answer import Answer
from services.gateway.error_response import error_response
from services.gateway.note import Note
from services.gateway.reader import EventReader
from services.scheduler.limits import SchedulerLimits
from shared.api.errors import ANSWERS, STATUSES, ApiError, api_error, ended_error
from shared.errors import CellpipeError, ErrorCode, RequestError
from shared.messages import FinishReason, Request, SamplingParams
from tests.rig import Rig
from tests.rig_model import SAMPLED, rig_tokenizer


def every_class(root: type[CellpipeError] = CellpipeError) -> Iterator[type[CellpipeError]]:
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == "shared.errors":
            yield from every_class(kind)


def test_every_code_of_an_end_has_a_status() -> None:
    assert set(STATUSES) == set(ErrorCode)
    for code in ErrorCode:
        error = ended_error(code, "why", "field")
        assert 400 <= error.status < 600
        assert error.body()["error"]["code"] == code
        assert error.body()["error"]["param"] == "field"
        assert (error.retry_after_s is not None) == (error.status in (429, 503))
    assert ended_error("of a later version", "why").status == 500


def test_every_class_of_errors_has_a_status() -> None:
    assert set(every_class()) == {*ANSWERS, RequestError}
    for status, _ in ANSWERS.values():
        assert status in (429, 500, 503)


def test_what_is_not_supported_is_not_to_be_asked_again() -> None:
    unsupported, away = (error_response(ApiError(status, "why")) for status in (501, 503))

    assert unsupported.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in away.headers


def test_what_is_asked_in_vain_is_the_clients_error() -> None:
    refusals = {
        ErrorCode.INVALID_VALUE: 400,
        ErrorCode.CONTEXT_LENGTH: 400,
        ErrorCode.KV_MEMORY: 400,
        ErrorCode.MODEL_NOT_FOUND: 404,
    }

    for code, status in refusals.items():
        error = api_error(RequestError("too much", remedy="ask less", code=code, param="x"))

        assert (error.status, error.param, error.code) == (status, "x", code)
        assert error.message == "too much; ask less"


LONG = SamplingParams(max_tokens=200)


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"token_ids": tuple(range(2, 258))}, 400, "messages", "context_length_exceeded"),
        ({"token_ids": (5, 268)}, 400, "messages", "invalid_value"),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"sampling": LONG}, 400, "max_tokens", "kv_memory_exceeded"),
    ],
)
def test_a_refusal_of_the_scheduler_is_a_4xx_that_names_the_field(
    fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    rig = Rig(1)
    rig.add_worker(0)
    rig.add_scheduler(limits=SchedulerLimits(kv_budget_bytes=20_000))
    request: dict[str, Any] = {"token_ids": (5, 6), "sampling": SAMPLED, **fields}

    error = failure_of(rig, Request("chatcmpl-0-0", **request))

    assert (error.status, error.param, error.code) == (status, param, code)
    assert error.message


def test_a_cluster_without_workers_says_when_to_come_again() -> None:
    rig = Rig(1)
    rig.coverage = [0]
    rig.add_scheduler()

    error = failure_of(rig, Request("chatcmpl-0-0", token_ids=(5, 6), sampling=SAMPLED))

    assert (error.status, error.code) == (503, "no_workers")
    assert error.retry_after_s is not None


def test_a_request_whose_time_is_over_is_a_504() -> None:
    rig = Rig(1)
    rig.add_worker(0)
    rig.add_scheduler()

    error = failure_of(
        rig, Request("chatcmpl-0-0", token_ids=(5, 6), sampling=SAMPLED, deadline_unix_ms=1)
    )

    assert (error.status, error.code) == (504, "timeout")


def failure_of(rig: Rig, request: Request) -> ApiError:
    """What a client of the gateway hears of a request that fails."""
    rig.submit(request)
    rig.run_until(lambda: bool(rig.final_events(request.request_id)))
    assert rig.final_events(request.request_id)[0].finish_reason is FinishReason.ERROR
    note = Note("chat", "", 0, 2**53, 1, 1, (), False, False)

    async def follow() -> None:
        reader = EventReader(rig.ledger, gather_s=0.0)
        reader.start()
        answer = Answer(
            "chatcmpl-0",
            note,
            tokenizer=rig_tokenizer(),
            feed=reader.open([request.request_id]),
            cut=lambda _: None,
        )
        try:
            while True:
                await answer.next(5.0)
        finally:
            reader.stop()

    with pytest.raises(ApiError) as failed:
        asyncio.run(follow())
    assert json.dumps(failed.value.body())
    return failed.value
