"""Sends an answer to its client, whole or as server-sent events, and notices when it hangs up.

Format of the stream: https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.answer import Answer
from services.gateway.gateway import Gateway
from shared.api.choice import Piece
from shared.api.documents import Chunks, whole_document
from shared.api.errors import ApiError, api_error
from shared.errors import CellpipeError

# A refusal of the cluster comes within this time, and still has its own status.
OPENING_S = 1.0
SEND_TIMEOUT_S = 60.0  # of a client that does not read
WAIT_S = 1.0


class _HungUp(Exception):
    """The client is gone."""


class AnswerReply(Response):
    """Base: runs `_reply` as long as the client is there, and then leaves or abandons the answer.

    When the server stops, the answer is left as it is: another gateway may go on with it.
    """

    may_resume = False
    looks_on = False

    def __init__(self, gateway: Gateway, answer: Answer) -> None:
        super().__init__()
        self._gateway = gateway
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _while_there(self._reply(scope, receive, send), receive)
        except _HungUp:
            if self.looks_on:
                self._gateway.leave(self._answer)
            else:
                self._gateway.abandon(self._answer, may_resume=self.may_resume)
        except (ApiError, CellpipeError):
            # One choice has failed: nobody will read the others.
            self._gateway.cancel(
                c.request_id for c in self._answer.choices if c.finish_reason is None
            )
            self._gateway.leave(self._answer)
            raise
        except BaseException:
            self._gateway.leave(self._answer)
            raise
        else:
            self._gateway.leave(self._answer)

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


class WholeReply(AnswerReply):
    """One JSON object when everything is there. Who only `looks_on` cancels nothing."""

    def __init__(self, gateway: Gateway, answer: Answer, *, looks_on: bool = False) -> None:
        super().__init__(gateway, answer)
        self.looks_on = looks_on

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        whole = [Piece(choice.index) for choice in answer.choices]
        while not answer.has_ended or answer.usage is None:
            pieces = await answer.next(WAIT_S)
            for piece in pieces:
                mine = whole[piece.index]
                mine.text += piece.text
                mine.tokens += piece.tokens
                mine.calls += piece.calls
            if not pieces:
                await self._gateway.check(is_running=True)
        backend = self._gateway.backend
        if answer.note.logprobs is None:
            document = whole_document(answer, whole, backend)
        else:  # may take a second to write, in which others want their tokens
            document = await self._gateway.text(lambda: whole_document(answer, whole, backend))
        await Response(document, media_type="application/json")(scope, receive, send)


class StreamReply(AnswerReply):
    """Events as they come. Each has an id, from which any gateway can go on."""

    may_resume = True

    def __init__(
        self, gateway: Gateway, answer: Answer, *, keep_alive_s: float, tail: str = ""
    ) -> None:
        super().__init__(gateway, answer)
        self._keep_alive_s = keep_alive_s
        self._tail = tail
        self._chunks = Chunks(answer, gateway.backend, include_usage=answer.note.include_usage)

    async def _reply(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer, chunks = self._answer, self._chunks
        opened = answer.open_choices() if answer.note.kind == "chat" else []
        pieces = [] if self._is_complete() else await answer.next(OPENING_S)
        await _send_head(send)
        try:
            await _send_events(send, [(p.event_id, chunks.opening(p)) for p in opened])
            quiet_since_s = time.monotonic()
            while True:
                if pieces:
                    await _send_events(send, [(p.event_id, chunks.piece(p)) for p in pieces])
                    quiet_since_s = time.monotonic()
                if self._is_complete():
                    break
                quiet_s = time.monotonic() - quiet_since_s
                if quiet_s >= self._keep_alive_s:
                    # No blank line: OpenAI's client takes one after an id for an event.
                    await _send_body(send, ": keep-alive\n")
                    quiet_since_s = time.monotonic()
                    await self._gateway.check(is_running=True)
                    continue
                pieces = await answer.next(self._keep_alive_s - quiet_s)
            await self._send_end(send)
        except (ApiError, CellpipeError) as error:
            # It cannot be raised: the status is sent.
            failure = error if isinstance(error, ApiError) else api_error(error)
            self._gateway.cancel(c.request_id for c in answer.choices if c.finish_reason is None)
            text = f"data: {json.dumps(failure.body())}\n\ndata: [DONE]\n\n"
            await _send_body(send, text, more=False)

    def _is_complete(self) -> bool:
        answer = self._answer
        if answer.has_failed or not all(shown.is_finished for shown in answer.shown):
            return False
        return not answer.note.include_usage or self._tail != "" or answer.usage is not None

    async def _send_end(self, send: Send) -> None:
        answer = self._answer
        last = [(answer.event_id("d"), "[DONE]")]
        if answer.note.include_usage and self._tail == "":
            assert answer.usage is not None, "every request has ended"
            last.insert(0, (answer.event_id("u"), self._chunks.usage(answer.usage)))
        await _send_events(send, last, more=False)


async def _send_head(send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _send_events(send: Send, events: list[tuple[str, str]], *, more: bool = True) -> None:
    if events:
        text = "".join(f"id: {event_id}\ndata: {chunk}\n\n" for event_id, chunk in events)
        await _send_body(send, text, more=more)


async def _send_body(send: Send, text: str, *, more: bool = True) -> None:
    try:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
    except TimeoutError:
        raise _HungUp from None


async def _while_there(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Run `work` to its end. Raises `_HungUp` when the client goes away before."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _HungUp
        await working
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
