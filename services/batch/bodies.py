"""Between bodies in OpenAI's format and requests and replies. Pure: knows no file and no queue.

Fields and defaults are those of https://platform.openai.com/docs/api-reference/chat and
/completions; `top_k`, `min_p`, `repetition_penalty` and `ignore_eos` are vLLM's additions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from shared.codec_fields import as_bool, as_float, as_int
from shared.codec_sampling import read_bias
from shared.errors import PermanentError, RequestError, StoreDamaged
from shared.logprobs import MAX_TOP_LOGPROBS
from shared.messages import MAX_SEED, ChatMessage, FinishReason, Reply, Request, SamplingParams
from shared.text.logprobs import chat_logprobs, shown_tokens, text_logprobs
from shared.text.response_format import FormatError, ResponseFormat, read_response_format
from shared.text.tokenizer import Tokenizer

T = TypeVar("T")

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"
URLS = (CHAT_URL, COMPLETIONS_URL)
COMPLETIONS_MAX_TOKENS = 16  # OpenAI's default; a chat goes on to the end of the context there

_PASSED_OVER = frozenset({"user", "metadata", "store", "service_tier", "stream_options"})
# What is not served may be given with the value that asks for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "stop": ([], ""),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
_PLAIN = ("top_k", "top_p", "seed", "ignore_eos", "min_p", "frequency_penalty", "presence_penalty",
          "repetition_penalty", "logit_bias")  # fmt: skip
_COMMON = frozenset({"model", "max_tokens", "temperature", "logprobs", *_PLAIN})
MAX_TEXT_LOGPROBS = 5  # as OpenAI's
_OWN = {
    CHAT_URL: frozenset({"messages", "max_completion_tokens", "top_logprobs", "response_format"}),
    COMPLETIONS_URL: frozenset({"prompt"}),
}


class BodyError(RequestError):
    """A body that cannot be served; `param` is the field."""

    def __init__(self, message: str, *, param: str) -> None:
        super().__init__(message)
        self.param = param


def request_of(
    url: str, body: Mapping[str, Any], *, request_id: str, chat_max_tokens: int
) -> Request:
    """The request that a body asks for. Raises `BodyError` naming the field.

    `chat_max_tokens` is for a chat that names no limit.
    """
    given = {name: value for name, value in body.items() if value is not None}
    _refuse_what_is_not_served(url, given)
    messages: tuple[ChatMessage, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    if url == CHAT_URL:
        messages = _messages(given.get("messages"))
        max_tokens = given.get("max_completion_tokens", given.get("max_tokens", chat_max_tokens))
    else:
        prompt, token_ids = _prompt(given.get("prompt"))
        max_tokens = given.get("max_tokens", COMPLETIONS_MAX_TOKENS)
    model = given.get("model", "")
    if not isinstance(model, str):
        raise BodyError("model must be text", param="model")
    values: dict[str, Any] = {
        "temperature": given.get("temperature", 1.0),
        "max_tokens": max_tokens,
        **{name: given[name] for name in _PLAIN if name in given},
    }
    sampling = SamplingParams()
    for name, value in values.items():  # one at a time, so that an error names its field
        sampling = _checked(name, partial(_with, sampling, name, value))
    sampling = replace(sampling, logprobs=_num_logprobs(url, given))
    response_format = _response_format(given.get("response_format"))
    return _checked(
        "messages" if url == CHAT_URL else "prompt",
        lambda: Request(
            request_id=request_id,
            prompt=prompt,
            messages=messages,
            token_ids=token_ids,
            model=model,
            sampling=sampling,
            response_format=response_format,
        ),
    )


def response_body(
    url: str,
    reply: Reply,
    *,
    model_id: str,
    created_unix_s: int,
    logprobs: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The body of a successful response to a request to `url`."""
    is_chat = url == CHAT_URL
    choice: dict[str, Any] = {"index": 0}
    if is_chat:
        choice["message"] = {"role": "assistant", "content": reply.text}
    else:
        choice["text"] = reply.text
    choice |= {"logprobs": logprobs, "finish_reason": str(reply.finish_reason)}
    num_prompt, num_generated = reply.num_prompt_tokens, len(reply.token_ids)
    return {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{reply.request_id}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": created_unix_s,
        "model": model_id,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
        },
    }


def response_logprobs(url: str, reply: Reply, num_top: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The log probabilities of a response to a request that asked for them."""
    if reply.logprobs is None and reply.token_ids:
        raise StoreDamaged("the store has lost the log probabilities of the answer")
    tokens = shown_tokens(reply.token_ids, reply.logprobs or (), tokenizer)
    if url == CHAT_URL:
        return chat_logprobs(tokens, tokenizer)
    return text_logprobs(tokens, tokenizer, num_top=num_top)


def error_body(message: str, *, param: str | None = None) -> dict[str, Any]:
    """The body of a response to a request that cannot be served, status 400."""
    return {
        "error": {
            "message": message,
            "type": "invalid_request_error",
            "param": param,
            "code": None,
        }
    }


def was_refused(reply: Reply) -> bool:
    """Whether it failed at the door, for what it asked, not on its way."""
    return reply.finish_reason is FinishReason.ERROR and reply.num_prompt_tokens == 0


def _refuse_what_is_not_served(url: str, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in _COMMON or name in _OWN[url] or name in _PASSED_OVER:
            continue
        if name not in _NEUTRAL:
            raise BodyError(f"{name} is not known", param=name)
        if not any(value == neutral for neutral in _NEUTRAL[name]):
            raise BodyError(f"{name} is not supported, got {value!r:.80}", param=name)


def _checked(param: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except PermanentError as error:
        raise BodyError(str(error), param=param) from error


def _with(sampling: SamplingParams, name: str, value: Any) -> SamplingParams:
    match name:
        case "temperature" | "top_p" | "min_p":
            read: Any = as_float(name, value)
        case "frequency_penalty" | "presence_penalty" | "repetition_penalty":
            read = as_float(name, value)
        case "logit_bias":
            read = read_bias(value)
        case "ignore_eos":
            read = as_bool(name, value)
        case "seed":
            read = None if value is None else as_int(name, value, 0, MAX_SEED)
        case _:
            read = as_int(name, value)
    return replace(sampling, **{name: read})


def _response_format(value: Any) -> ResponseFormat | None:
    try:
        wanted = None if value is None else read_response_format(value)
    except FormatError as error:
        raise BodyError(str(error), param=error.path) from error
    if wanted is not None and wanted.functions:
        raise BodyError(
            "response_format.type tool_calls is not known", param="response_format.type"
        )
    return wanted


def _num_logprobs(url: str, given: Mapping[str, Any]) -> int | None:
    """How many likeliest tokens are asked for at each place; None for no probabilities."""
    if url != CHAT_URL:
        if given.get("logprobs", False) is False:  # a chat's word for none, and taken here too
            return None
        return _checked(
            "logprobs", lambda: as_int("logprobs", given["logprobs"], 0, MAX_TEXT_LOGPROBS)
        )
    asks = _checked("logprobs", lambda: as_bool("logprobs", given.get("logprobs", False)))
    num_top = given.get("top_logprobs", 0)
    num_top = _checked("top_logprobs", lambda: as_int("top_logprobs", num_top, 0, MAX_TOP_LOGPROBS))
    if num_top and not asks:
        raise BodyError(f"top_logprobs {num_top} is for logprobs: true", param="top_logprobs")
    return num_top if asks else None


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise BodyError("messages must be a list of at least one message", param="messages")
    return tuple(_message(number, turn) for number, turn in enumerate(value))


def _message(number: int, turn: Any) -> ChatMessage:
    param = f"messages[{number}]"
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise BodyError(f"{param} must be an object with a role", param=param)
    if turn.get("tool_calls") or turn["role"] in ("tool", "function"):
        raise BodyError(f"{param}: tools are not supported", param=param)
    content = turn.get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if _is_text(part)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise BodyError(
            f"{param}.content must be text, or a list of parts of type text",
            param=f"{param}.content",
        )
    return ChatMessage(turn["role"], content)


def _is_text(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _prompt(value: Any) -> tuple[str | None, tuple[int, ...] | None]:
    """A text or its token ids; OpenAI also takes a list of one of them."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value, None
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return None, tuple(value)
    raise BodyError("prompt must be one text, or a list of its token ids", param="prompt")
