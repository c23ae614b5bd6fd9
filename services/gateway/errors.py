"""What a client is told when something fails, in OpenAI's shape. Knows no request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from shared.errors import CellpipeError, Overloaded, RequestError, TransientError

RETRY_AFTER_S = 5.0
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A refusal with its HTTP status. `param` names the field at fault, `code` the reason."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(
            self.status,
            "invalid_request_error" if self.status < 500 or self.status == 501 else "server_error",
        )
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, headers: Mapping[str, str] | None = None) -> JSONResponse:
        extra = dict(headers or {})
        if self.retry_after_s is not None:
            extra["retry-after"] = str(math.ceil(self.retry_after_s))
        if self.status == 401:
            extra["www-authenticate"] = "Bearer"
        return JSONResponse(self.body(), status_code=self.status, headers=extra)


def api_error(error: CellpipeError) -> ApiError:
    """What an error of ours means to a client."""
    text = f"{error}; {error.remedy}" if error.remedy else str(error)
    match error:
        case Overloaded():
            return ApiError(429, text, code="overloaded", retry_after_s=error.retry_after_s)
        case TransientError():
            # Names of hosts and ports are for the log.
            return ApiError(
                503,
                "the service is not available for now; try again",
                code="unavailable",
                retry_after_s=RETRY_AFTER_S,
            )
        case RequestError():
            return ApiError(400, text)
        case _:
            return ApiError(500, "the service failed", code="internal_error")
