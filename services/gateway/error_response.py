"""A refusal as an HTTP response."""

from __future__ import annotations

import math
from collections.abc import Mapping

from starlette.responses import JSONResponse

from shared.api.errors import ApiError


def error_response(error: ApiError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """With the headers that its status asks for, and those given."""
    extra = dict(headers or {})
    if error.retry_after_s is not None:
        extra["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.status == 501:  # OpenAI's clients take it for one that passes, and ask again
        extra["x-should-retry"] = "false"
    if error.status == 401:
        extra["www-authenticate"] = "Bearer"
    return JSONResponse(error.body(), status_code=error.status, headers=extra)
