"""What clients may send, field by field; docs/api.md is made from it. Knows no pipeline.

Nothing is dropped in silence: a field that this server does not know, or cannot do, is an error
that names it. Longer than other modules: every field of every body has its line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import from_json

from shared.api.errors import ApiError
from shared.api.fields import (
    Bias,
    Content,
    Number,
    Peers,
    Prompts,
    Stops,
    ToolChoice,
    check_refused,
    refused,
)
from shared.logprobs import MAX_TOP_LOGPROBS
from shared.messages import MAX_SEED, MAX_TOKENS_LIMIT
from shared.sampling_params import MAX_BIASES, MAX_PENALTY, MAX_REPETITION, MIN_REPETITION
from shared.text.response_format import MAX_FUNCTIONS

MAX_CHOICES = 32
MAX_MESSAGES = 4096
MAX_METADATA = 16
MAX_TEXT_LOGPROBS = 5  # as OpenAI's

_BOTH = Peers(True, True, True)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @field_validator("*")
    @classmethod
    def _refuse(cls, value: Any, about: ValidationInfo) -> Any:
        assert about.field_name is not None, "this is a validator of fields"
        no_ops = no_ops_of(cls.model_fields[about.field_name])
        if no_ops is None:
            return value
        check_refused(value, no_ops)
        return None


def no_ops_of(field: FieldInfo) -> list[Any] | None:
    """The values that a refused field takes; None for a field that is supported."""
    extra = field.json_schema_extra
    no_ops = extra.get("enum") if isinstance(extra, dict) else None
    return no_ops if isinstance(no_ops, list) else None


class StreamOptions(Body):
    include_usage: Annotated[bool, _BOTH] = False
    include_obfuscation: Annotated[Any, Peers(True, False, False)] = refused(False)


class CalledFunction(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    arguments: str = ""


class ToolCall(Body):
    """A call that the model made earlier."""

    id: Annotated[str, Field(max_length=256)] = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Annotated[int | None, Peers(False, False, True, "no effect")] = None


class Message(Body):
    role: Annotated[Literal["system", "developer", "user", "assistant", "tool"], _BOTH]
    content: Annotated[
        Content | None, Peers(True, True, True, "may be absent beside `tool_calls`")
    ] = None
    name: Annotated[Any, Peers(True, True, True)] = refused()
    refusal: Annotated[Any, Peers(True, False, False)] = refused()
    audio: Annotated[Any, Peers(True, False, False)] = refused()
    annotations: Annotated[Any, Peers(True, False, False)] = refused([])
    tool_calls: Annotated[
        list[ToolCall] | None,
        Field(max_length=MAX_FUNCTIONS),
        Peers(True, True, True, "of role `assistant`"),
    ] = None
    tool_call_id: Annotated[
        str | None, Field(max_length=256), Peers(True, True, True, "of role `tool`")
    ] = None
    function_call: Annotated[Any, Peers(True, False, False)] = refused()


class ToolFunction(Body):
    name: Annotated[str, Field(max_length=64), Peers(True, True, True, "letters, digits, - and _")]
    description: Annotated[str | None, _BOTH] = None
    parameters: Annotated[
        dict[str, Any] | None, Peers(True, True, True, "JSON schema; default: none")
    ] = None
    strict: Annotated[
        bool | None,
        Peers(True, False, False, "a forced call is held to its schema either way"),
    ] = None


class Tool(Body):
    type: Literal["function"]
    function: ToolFunction


Penalty = Annotated[Number | None, Field(ge=-MAX_PENALTY, le=MAX_PENALTY)]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)]


class Generation(Body):
    """What chat and text completions have in common."""

    model: Annotated[
        str,
        Field(max_length=256),
        Peers(
            True,
            True,
            True,
            'its name, name@digest or name in the catalog; "" or absent is the model that runs',
        ),
    ] = ""
    stream: Annotated[bool | None, _BOTH] = None
    stream_options: Annotated[
        StreamOptions | None, Peers(True, True, True, "`include_usage`; only with `stream`")
    ] = None
    temperature: Annotated[Number | None, Field(ge=0, le=2), _BOTH] = None
    top_p: Annotated[Number | None, Field(gt=0, le=1), _BOTH] = None
    top_k: Annotated[
        int | None, Field(ge=-1, le=2**31 - 1), Peers(False, True, True, "0 and -1 are off")
    ] = None
    seed: Annotated[
        int | None,
        Field(ge=-(2**63), le=MAX_SEED),
        Peers(True, True, True, "choice i of `n` draws with seed + i"),
    ] = None
    stop: Annotated[Stops, Peers(True, True, True, "up to 16 strings; never part of the text")] = ()
    n: Annotated[
        int | None, Field(ge=1, le=MAX_CHOICES), Peers(True, True, True, f"up to {MAX_CHOICES}")
    ] = None
    ignore_eos: Annotated[bool | None, Peers(False, True, True)] = None
    user: Annotated[str | None, Field(max_length=1024), Peers(True, False, False, "no effect")] = (
        None
    )
    frequency_penalty: Annotated[
        Penalty, Peers(True, True, True, "for each time in the answer")
    ] = None
    presence_penalty: Annotated[Penalty, Peers(True, True, True, "once, if in the answer")] = None
    repetition_penalty: Annotated[
        Number | None,
        Field(ge=MIN_REPETITION, le=MAX_REPETITION),
        Peers(False, False, True, "of prompt and answer; 1 is off"),
    ] = None
    repeat_penalty: Annotated[Any, Peers(False, True, False)] = refused(1)
    min_p: Annotated[
        Number | None, Field(ge=0, le=1), Peers(False, True, True, "0 is off; llama-server: 0.05")
    ] = None
    logit_bias: Annotated[
        Bias, Peers(True, True, True, f"up to {MAX_BIASES} token ids, each -100 to 100")
    ] = ()


class ChatCompletion(Generation):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES), _BOTH]
    max_tokens: Annotated[
        Tokens | None, Peers(True, True, True, "default: what the context holds")
    ] = None
    max_completion_tokens: Annotated[
        Tokens | None, Peers(True, True, True, "the same; only one may be given")
    ] = None
    store: Annotated[
        bool | None, Peers(True, False, False, "goes on when the client hangs up; GET by id")
    ] = None
    metadata: Annotated[
        dict[str, str] | None,
        Field(max_length=MAX_METADATA),
        Peers(True, False, False, "no effect"),
    ] = None
    service_tier: Annotated[Any, Peers(True, False, False)] = refused("auto", "default")
    logprobs: Annotated[
        bool | None, Peers(True, True, True, "of the model, before bias, penalties and temperature")
    ] = None
    top_logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_TOP_LOGPROBS),
        Peers(True, True, True, "only with `logprobs: true`"),
    ] = None
    response_format: Annotated[
        dict[str, Any] | None,
        Peers(True, True, True, "`text`, `json_object`, `json_schema`; see below"),
    ] = None
    tools: Annotated[
        list[Tool] | None,
        Field(max_length=MAX_FUNCTIONS),
        Peers(True, True, True, "functions; see below"),
    ] = None
    tool_choice: Annotated[
        ToolChoice | None,
        Peers(True, True, True, "or the function that must be called"),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None, Peers(True, True, True, "false: one call at most")
    ] = None
    functions: Annotated[Any, Peers(True, False, False)] = refused([])
    function_call: Annotated[Any, Peers(True, False, False)] = refused("none")
    modalities: Annotated[Any, Peers(True, False, False)] = refused(["text"])
    audio: Annotated[Any, Peers(True, False, False)] = refused()
    prediction: Annotated[Any, Peers(True, False, False)] = refused()
    reasoning_effort: Annotated[Any, Peers(True, False, True)] = refused("none")
    web_search_options: Annotated[Any, Peers(True, False, False)] = refused()


class TextCompletion(Generation):
    """Body of POST /v1/completions."""

    prompt: Annotated[
        Prompts,
        Peers(True, True, True, "text, token ids, or a list; an empty one begins a text"),
    ] = ("",)
    max_tokens: Annotated[Tokens | None, Peers(True, True, True, "default 16")] = None
    best_of: Annotated[Any, Peers(True, False, False)] = refused(1)
    echo: Annotated[Any, Peers(True, False, True)] = refused(False)
    logprobs: Annotated[
        int | None,
        Field(ge=0, le=MAX_TEXT_LOGPROBS),
        Peers(True, True, True, "so many likeliest tokens, and the one that was drawn"),
    ] = None
    suffix: Annotated[Any, Peers(True, False, False)] = refused("")


class Tokenize(Body):
    """Body of POST /tokenize: one of `content`, `prompt` (the same) and `messages`."""

    model: Annotated[str, Field(max_length=256), Peers(False, False, True)] = ""
    content: Annotated[str | None, Peers(False, True, False)] = None
    prompt: Annotated[str | None, Peers(False, False, True)] = None
    messages: Annotated[
        list[Message] | None,
        Field(min_length=1, max_length=MAX_MESSAGES),
        Peers(False, False, True),
    ] = None


class Detokenize(Body):
    """Body of POST /detokenize."""

    model: Annotated[str, Field(max_length=256), Peers(False, False, True)] = ""
    tokens: Annotated[list[int], Field(max_length=1 << 16), Peers(False, True, True)]


BodyType = TypeVar("BodyType", bound=Body)


def read_body(raw: bytes, kind: type[BodyType]) -> BodyType:
    """The body of a request. Raises `ApiError` 400 that names the field at fault."""
    try:
        document = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON in UTF-8: {error!s:.200}") from None
    if not isinstance(document, dict):
        raise ApiError(400, "the body must be a JSON object")
    return check_body(document, kind)


def check_body(document: dict[str, Any], kind: type[BodyType]) -> BodyType:
    """A body that is JSON. Raises as `read_body`."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = _path(first["loc"])
    match first["type"]:
        case "extra_forbidden":
            return ApiError(
                400,
                f"unrecognized request argument: {param:.100}",
                param=param[:100],
                code="unknown_parameter",
            )
        case "unsupported":
            return ApiError(
                400, f"{param} {first['msg']}", param=param, code="unsupported_parameter"
            )
        case "missing":
            return ApiError(
                400,
                f"missing required parameter: {param}",
                param=param,
                code="missing_required_parameter",
            )
        case _:
            given = first["input"]
            got = f", got {given!r:.40}" if isinstance(given, int | float) else ""
            message = f"{param}: {first['msg']:.300}{got}"
            return ApiError(400, message, param=param, code="invalid_value")


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
