"""Everything that is done for every request: its id, who asks, the log line, the last error.

Knows no endpoint.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access import Keys
from services.gateway.error_response import error_response
from shared.api.errors import ApiError

log = structlog.get_logger()

OPEN_PATHS = frozenset({"/health", "/ready"})  # for load balancers, which have no key
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


class Front:
    """Wraps the application. `host_names` are those it may be called by; empty for any.

    Without keys that is what keeps web pages from it, by names that lead to this machine.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys, host_names: Sequence[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._host_names = frozenset(host_names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        request_id = f"req-{secrets.token_hex(12)}"
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        owner = ""
        try:
            owner = self._check(scope)
            scope.setdefault("state", {})["owner"] = owner
            await self._app(scope, receive, send_named)
        except ApiError as refusal:
            await error_response(refusal, {"connection": "close"})(scope, receive, send_named)
        except Exception:
            log.exception("request_failed", request_id=request_id)
            if status:
                raise  # the server then cuts the connection
            failure = ApiError(500, "the service failed", code="internal_error")
            await error_response(failure)(scope, receive, send_named)
        finally:
            log.info(
                "http_done",
                request_id=request_id,
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                key=owner,
                duration_ms=round((time.monotonic() - began_s) * 1e3),
            )

    def _check(self, scope: Scope) -> str:
        headers = Headers(scope=scope)
        if self._host_names:
            name = headers.get("host", "").lower()
            if not name.endswith("]"):
                name = name.rpartition(":")[0] or name
            if name not in self._host_names:
                raise ApiError(403, "this server is not known by that name")
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return ""
        return self._keys.name_of(headers.get("authorization"))
