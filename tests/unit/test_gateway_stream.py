"""What a client of the API is sent when its request fails: before its first token, and after it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.gateway.access import Keys
from services.gateway.app import HttpOptions, make_app
from services.gateway.backend import Backend
from services.gateway.gateway import Gateway, GatewayLimits
from shared import codec
from shared.broker.memory import MemoryBroker, MemoryHub
from shared.errors import ErrorCode
from shared.messages import FinishReason, Request
from shared.producer import Producer
from shared.store.completions import Completions
from shared.store.connection import connect
from shared.store.ledger_types import LedgerRecord
from shared.store.memory_ledger import MemoryLedger
from shared.topology import REQUESTS_QUEUE, control_queues
from tests.api_server import read_events, texts_of
from tests.rig_model import rig_api_model
from tests.spelling_model import byte_token

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}


@dataclass
class Sent:
    """What the server has sent so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    has_ended: bool = False


class Api:
    """The application, without a socket; a test plays the cluster behind it."""

    def __init__(self) -> None:
        self.ledger = MemoryLedger()
        hub = MemoryHub()
        self._taker = MemoryBroker(hub)
        self._taker.declare(control_queues())
        self._taker.consume(REQUESTS_QUEUE, prefetch=10)
        model = rig_api_model()
        backend = Backend(
            tokenizer=model.tokenizer,
            chat_template=model.chat_template,
            model_id=model.model_id,
            vocab_size=model.vocab_size,
            max_positions=model.max_positions,
            producer=Producer(MemoryBroker(hub), self.ledger),
            ledger=self.ledger,
            completions=Completions(connect("memory://").meta),
            problem=lambda: "",
            gather_s=0.0,
        )
        self.gateway = Gateway(backend, GatewayLimits())
        self.app = make_app(self.gateway, Keys(), HttpOptions())

    async def post(self, body: dict[str, Any], sent: Sent) -> None:
        raw = [json.dumps(body).encode()]

        async def receive() -> dict[str, Any]:
            if raw:
                return {"type": "http.request", "body": raw.pop(), "more_body": False}
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent.status = message["status"]
                sent.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                sent.body += message.get("body", b"")
                sent.has_ended = not message.get("more_body", False)

        scope = {
            "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(),
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
        }  # fmt: skip
        await self.app(scope, receive, send)

    async def taken(self) -> Request:
        """The request that came, as a scheduler takes it."""
        delivery = await asyncio.to_thread(self._taker.take, 5.0)
        assert delivery is not None
        request = codec.decode(delivery.body, delivery.content_type)
        assert isinstance(request, Request)
        return request

    def admit(self, request: Request) -> int:
        """The position of its first token."""
        token_ids = request.token_ids or ()
        assert self.ledger.admit(
            LedgerRecord(request.request_id, "m@0", "l", token_ids, request.sampling, 99)
        )
        return len(token_ids)


REFUSALS = [
    (ErrorCode.INVALID_VALUE, "token_ids", 400, "messages"),
    (ErrorCode.KV_MEMORY, "max_tokens", 400, "max_tokens"),
    (ErrorCode.MODEL_NOT_FOUND, "model", 404, "model"),
    (ErrorCode.NO_WORKERS, "", 503, None),
]


@pytest.mark.parametrize(("code", "field", "status", "param"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_has_its_own_status_before_the_first_token(
    code: ErrorCode, field: str, status: int, param: str | None, stream: bool
) -> None:
    async def ask() -> Sent:
        api, sent = Api(), Sent()
        api.gateway.start()
        asking = asyncio.create_task(api.post({**BODY, "n": 1, "stream": stream}, sent))
        request = await api.taken()
        api.ledger.refuse(
            LedgerRecord(
                request.request_id,
                "m@0",
                "l",
                (),
                request.sampling,
                0,
                finish_reason=FinishReason.ERROR,
                error="no",
                error_code=code,
                error_param=field,
            )
        )
        await asking
        await api.gateway.stop()
        return sent

    sent = asyncio.run(ask())
    error = json.loads(sent.body)["error"]

    assert sent.status == status
    assert (error["message"], error["param"], error["code"]) == ("no", param, str(code))
    assert ("retry-after" in sent.headers) == (status == 503)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_a_failure_after_the_first_token_is_an_event_and_then_the_end(code: ErrorCode) -> None:
    async def ask() -> Sent:
        api, sent = Api(), Sent()
        api.gateway.start()
        asking = asyncio.create_task(api.post({**BODY, "stream": True}, sent))
        request = await api.taken()
        position = api.admit(request)
        api.ledger.commit(request.request_id, 0, position, [byte_token(ord("a"))])
        while b'"a"' not in sent.body:
            await asyncio.sleep(0)
        api.ledger.finish(request.request_id, FinishReason.ERROR, "no more", code)
        await asking
        await api.gateway.stop()
        return sent

    sent = asyncio.run(ask())
    events = list(read_events(sent.body))

    assert (sent.status, sent.has_ended) == (200, True)
    assert texts_of(events) == ["a"]
    assert events[-1].document is None, "[DONE]"
    told = events[-2].document
    assert told is not None
    assert (told["error"]["message"], told["error"]["code"]) == ("no more", str(code))
    assert events[-2].event_id == "", "who comes back goes on from the token"
