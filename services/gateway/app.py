"""The endpoints. Knows no socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.gateway.access import Keys
from services.gateway.answer import Answer
from services.gateway.error_response import error_response
from services.gateway.event_ids import COMPLETION_ID, EventId, read_event_id
from services.gateway.front import Front
from services.gateway.gateway import Gateway
from services.gateway.openapi import openapi_document
from services.gateway.replies import StreamReply, WholeReply
from shared.api.ask import check_model, messages_token_ids
from shared.api.errors import ApiError, api_error
from shared.api.schema import (
    BodyType,
    ChatCompletion,
    Detokenize,
    Generation,
    TextCompletion,
    Tokenize,
    read_body,
)
from shared.errors import CellpipeError
from shared.text.prompt import check_token_ids, text_token_ids

BODY_TIMEOUT_S = 30.0
DISCARDED_BYTES = 8 << 20  # who is cut off while sending does not get to read why
MAX_EVENT_ID_CHARS = 4096


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """`host_names` are those the server may be called by, `origins` those of pages that may."""

    max_body_bytes: int = 4 << 20
    keep_alive_s: float = 15.0
    host_names: Sequence[str] = ()
    origins: Sequence[str] = ()


class Endpoints:
    def __init__(self, gateway: Gateway, options: HttpOptions) -> None:
        self._gateway = gateway
        self._backend = gateway.backend
        self._options = options
        self._started_unix_s = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatCompletion)

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, TextCompletion)

    async def _generate(self, request: Request, kind: type[Generation]) -> Response:
        body = await self._read(request, kind)
        event_id = _last_event_id(request)
        if event_id is not None:
            if not body.stream:
                raise ApiError(400, "Last-Event-ID is for stream: true", param="stream")
            return await self._resume(request, event_id)
        await self._gateway.check()
        answer = await self._gateway.ask(body, request.state.owner)
        if not body.stream:
            return WholeReply(self._gateway, answer)
        return self._stream(answer)

    async def pick_up(self, request: Request) -> Response:
        """GET an answer by its id: whole, or as a stream with ?stream=true or a Last-Event-ID."""
        completion_id = request.path_params["completion_id"]
        event_id = _last_event_id(request)
        if event_id is not None:
            if event_id.completion_id != completion_id:
                raise ApiError(400, "Last-Event-ID is of another answer", param="Last-Event-ID")
            return await self._resume(request, event_id)
        if not COMPLETION_ID.match(completion_id):
            raise ApiError(404, f"no completion {completion_id!r:.80}", code="completion_not_found")
        as_stream = request.query_params.get("stream") == "true"
        owner = request.state.owner
        answer = await self._gateway.pick_up(completion_id, owner, take=as_stream)
        if as_stream:
            return self._stream(answer)
        return WholeReply(self._gateway, answer, looks_on=True)

    async def _resume(self, request: Request, event_id: EventId) -> Response:
        owner = request.state.owner
        answer = await self._gateway.pick_up(event_id.completion_id, owner, event_id, take=True)
        return self._stream(answer, event_id.tail)

    def _stream(self, answer: Answer, tail: str = "") -> Response:
        return StreamReply(
            self._gateway, answer, keep_alive_s=self._options.keep_alive_s, tail=tail
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._backend)
        return JSONResponse(self._model())

    def _model(self) -> dict[str, object]:
        return {
            "id": self._backend.model_name,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "cellpipe",
            "root": self._backend.model_id,
            "max_model_len": self._backend.max_positions,
        }

    async def embeddings(self, _: Request) -> Response:
        raise ApiError(
            501, "embeddings are not supported: the model generates text", code="unsupported"
        )

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, Tokenize)
        check_model(body.model, self._backend)
        given = [n for n in ("content", "prompt", "messages") if getattr(body, n) is not None]
        if len(given) != 1:
            raise ApiError(400, "exactly one of content, prompt and messages must be given")
        backend = self._backend

        def tokens() -> tuple[int, ...]:
            if body.messages is not None:
                return messages_token_ids(body.messages, backend)
            text = body.content if body.content is not None else body.prompt or ""
            return text_token_ids(text, backend.tokenizer, max_positions=backend.max_positions)

        found = await self._gateway.text(tokens)
        return JSONResponse(
            {"tokens": found, "count": len(found), "max_model_len": backend.max_positions}
        )

    async def detokenize(self, request: Request) -> Response:
        body = await self._read(request, Detokenize)
        check_model(body.model, self._backend)
        check_token_ids(body.tokens, self._backend.tokenizer.vocab_size)
        text = self._backend.tokenizer.decode(body.tokens, skip_special=False, whole=True)
        return JSONResponse({"content": text, "prompt": text})

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        problem = await self._gateway.problem()
        if problem:
            return JSONResponse({"status": "not ready", "reason": problem}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(openapi_document())

    async def _read(self, request: Request, kind: type[BodyType]) -> BodyType:
        """The body. Raises `ApiError` for one that is too long, too slow or not as it should be."""
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            # A web page may send other types to any server without asking first.
            raise ApiError(415, "send the body as content-type: application/json")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                raw = await _read_at_most(request, self._options.max_body_bytes)
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {BODY_TIMEOUT_S:g} s") from None
        if len(raw) < 1 << 16:
            return read_body(raw, kind)
        return await self._gateway.text(lambda: read_body(raw, kind))


async def _read_at_most(request: Request, max_bytes: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {max_bytes} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > max_bytes + DISCARDED_BYTES:
        raise too_large
    raw, num_bytes = bytearray(), 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            raw += part
        elif num_bytes > max_bytes + DISCARDED_BYTES:
            raise too_large
    if num_bytes > max_bytes:
        raise too_large
    return bytes(raw)


def _last_event_id(request: Request) -> EventId | None:
    text = request.headers.get("last-event-id", "")
    if len(text) > MAX_EVENT_ID_CHARS:
        raise ApiError(400, "Last-Event-ID is none of this server's", param="Last-Event-ID")
    return read_event_id(text) if text else None


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # What is left of a body that was not read would be taken for the next request.
    headers = {"connection": "close"} if error.status in (408, 413, 415) else None
    return error_response(error, headers)


async def _our_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, CellpipeError)
    return error_response(api_error(error))


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(ApiError(error.status_code, str(error.detail)), error.headers)


async def _hung_up(_: Request, __: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


def make_app(gateway: Gateway, keys: Keys, options: HttpOptions) -> Front:
    """The ASGI application."""
    at = Endpoints(gateway, options)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        gateway.start()
        try:
            yield
        finally:
            await gateway.stop()

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", at.chat, methods=["POST"]),
            Route("/v1/chat/completions/{completion_id}", at.pick_up, methods=["GET"]),
            Route("/v1/completions", at.complete, methods=["POST"]),
            Route("/v1/completions/{completion_id}", at.pick_up, methods=["GET"]),
            Route("/v1/models", at.models, methods=["GET"]),
            Route("/v1/models/{name:path}", at.model, methods=["GET"]),
            Route("/v1/embeddings", at.embeddings, methods=["POST"]),
            Route("/tokenize", at.tokenize, methods=["POST"]),
            Route("/detokenize", at.detokenize, methods=["POST"]),
            Route("/health", at.health, methods=["GET"]),
            Route("/ready", at.ready, methods=["GET"]),
            Route("/openapi.json", at.openapi, methods=["GET"]),
        ],
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=list(options.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "last-event-id"],
                expose_headers=["x-request-id"],
            )
        ]
        if options.origins
        else [],
        exception_handlers={
            ApiError: _api_error,
            CellpipeError: _our_error,
            HTTPException: _http_error,
            ClientDisconnect: _hung_up,
        },
        lifespan=lifespan,
    )
    return Front(app, keys=keys, host_names=options.host_names)
