"""What a client is told when something fails, in OpenAI's shape. Knows no request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.errors import (
    BrokerUnavailable,
    CellpipeError,
    ConfigError,
    ConfirmTimeout,
    DecodeError,
    ErrorCode,
    KernelError,
    KvMissing,
    ModelError,
    Overloaded,
    PermanentError,
    PublishRefused,
    RequestError,
    ShardError,
    StoreDamaged,
    StoreUnavailable,
    TransientError,
    Unroutable,
)

RETRY_AFTER_S = 5.0
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


# Of every code that a request may end with.
STATUSES: Mapping[str, int] = {
    ErrorCode.INVALID_VALUE: 400,
    ErrorCode.CONTEXT_LENGTH: 400,
    ErrorCode.KV_MEMORY: 400,
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.NO_WORKERS: 503,
    ErrorCode.LOST: 503,
    ErrorCode.DEADLINE: 504,
    ErrorCode.FAILED: 500,
}
_AWAY, _BROKEN = (503, "unavailable"), (500, "internal_error")
# Of every class of errors but `RequestError`, which has a code; status and code.
ANSWERS: Mapping[type[CellpipeError], tuple[int, str]] = {
    Overloaded: (429, "overloaded"),
    PublishRefused: _AWAY,
    BrokerUnavailable: _AWAY,
    Unroutable: _AWAY,
    ConfirmTimeout: _AWAY,
    StoreUnavailable: _AWAY,
    KvMissing: _AWAY,
    TransientError: _AWAY,
    ConfigError: _BROKEN,
    DecodeError: _BROKEN,
    ShardError: _BROKEN,
    ModelError: _BROKEN,
    KernelError: _BROKEN,
    StoreDamaged: _BROKEN,
    PermanentError: _BROKEN,
    CellpipeError: _BROKEN,
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


def api_error(error: CellpipeError) -> ApiError:
    """What an error of ours means to a client."""
    text = f"{error}; {error.remedy}" if error.remedy else str(error)
    if isinstance(error, RequestError):
        return ended_error(error.code, text, error.param)
    status, code = next(ANSWERS[kind] for kind in type(error).__mro__ if kind in ANSWERS)
    if isinstance(error, Overloaded):
        return ApiError(status, text, code=code, retry_after_s=error.retry_after_s)
    # Names of hosts and ports are for the log.
    if status == 503:
        text = "the service is not available for now; try again"
        return ApiError(status, text, code=code, retry_after_s=RETRY_AFTER_S)
    return ApiError(status, "the service failed", code=code)


def ended_error(code: str, message: str, param: str = "") -> ApiError:
    """What it means to a client that a request ended with an error; of a code that a later version
    knows, that it failed."""
    status = STATUSES.get(code, 500)
    return ApiError(
        status,
        message or "the request failed",
        param=param or None,
        code=str(code or ErrorCode.FAILED),
        retry_after_s=RETRY_AFTER_S if status == 503 else None,
    )
