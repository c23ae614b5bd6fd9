"""Turns the body of a request into what will run. Tokenises: not for the event loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shared.api.errors import ApiError
from shared.api.model import ApiModel
from shared.api.schema import MAX_CHOICES, ChatCompletion, Generation, Message, TextCompletion
from shared.api.tools import Form, read_form, turns_of
from shared.errors import RequestError
from shared.messages import SamplingParams
from shared.model_names import is_called
from shared.text.constraint import GrammarError, check_grammar
from shared.text.prompt import check_token_ids, conversation_token_ids, text_token_ids

Kind = Literal["chat", "text"]

DEFAULT_TEXT_TOKENS = 16  # as OpenAI's
MAX_LOGPROBS = 400_000  # of one answer: 30 MB of JSON


@dataclass(frozen=True, slots=True)
class Ask:
    """Prompts as token ids, the sampling of each of their choices, and what they must be."""

    kind: Kind
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[SamplingParams, ...]
    n: int
    form: Form


def num_choices(body: Generation) -> int:
    """How many answers it asks for. Raises `ApiError` for too many."""
    prompts = len(body.prompt) if isinstance(body, TextCompletion) else 1
    number = prompts * (body.n or 1)
    if number > MAX_CHOICES:
        raise ApiError(400, f"prompts times n must be at most {MAX_CHOICES}, got {number}")
    return number


def read_ask(body: Generation, model: ApiModel, *, chat_tokens: int | None = None) -> Ask:
    """Raises `ApiError` for what the model cannot do, `RequestError` for a prompt it refuses.

    `chat_tokens` is for a chat that names no limit, None for what the model holds.
    """
    check_model(body.model, model)
    form = Form()
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is for stream: true", param="stream_options")
    for token_id, _ in body.logit_bias:
        if token_id >= model.vocab_size:
            raise ApiError(
                400,
                f"logit_bias names token {token_id}; the model has 0..{model.vocab_size - 1}",
                param="logit_bias",
                code="invalid_value",
            )
    match body:
        case ChatCompletion():
            if body.top_logprobs is not None and not body.logprobs:
                raise ApiError(
                    400,
                    f"top_logprobs {body.top_logprobs} is for logprobs: true",
                    param="top_logprobs",
                    code="invalid_value",
                )
            if body.max_tokens is not None and body.max_completion_tokens is not None:
                raise ApiError(
                    400,
                    "only one of max_tokens and max_completion_tokens may be given",
                    param="max_tokens",
                )
            form = read_form(body)
            if form.response_format is not None:
                _check_format(form)
            prompts: tuple[tuple[int, ...], ...] = (
                messages_token_ids(body.messages, model, form.tools),
            )
            name, asked = "max_tokens", body.max_tokens
            if body.max_completion_tokens is not None:
                name, asked = "max_completion_tokens", body.max_completion_tokens
            default = chat_tokens
            kind: Kind = "chat"
        case TextCompletion():
            prompts = tuple(_prompt_token_ids(prompt, model) for prompt in body.prompt)
            name, asked, default = "max_tokens", body.max_tokens, DEFAULT_TEXT_TOKENS
            kind = "text"
        case _:
            raise TypeError(f"no completion: {type(body).__name__}")
    if asked is None and default is not None:  # nobody asked for so many
        room = model.max_positions - max(map(len, prompts))
        asked = max(1, min(default, room))
    n = body.n or 1
    num_top = num_logprobs(body)
    samplings = tuple(
        _sampling(body, _max_tokens(body, tokens, asked, name, model), choice)
        for tokens in prompts
        for choice in range(n)
    )
    num_tokens = sum(sampling.max_tokens for sampling in samplings)
    if num_top is not None and num_tokens * (1 + num_top) > MAX_LOGPROBS:
        raise ApiError(
            400,
            f"the answer may have {num_tokens} tokens, and at {1 + num_top} log probabilities for "
            f"each that is over {MAX_LOGPROBS}; ask for fewer {name}",
            param="logprobs",
            code="invalid_value",
        )
    return Ask(kind, prompts, samplings, n, form)


def check_model(name: str, model: ApiModel) -> None:
    """Raise `ApiError` 404 unless the model that runs is called so; "" is whatever runs."""
    if name and not is_called(model.model_id, name):
        raise ApiError(
            404,
            f"the model {name!r} does not exist here; {model.model_name} does",
            param="model",
            code="model_not_found",
        )


def messages_token_ids(
    messages: list[Message], model: ApiModel, tools: Sequence[dict[str, Any]] = ()
) -> tuple[int, ...]:
    """Token ids of a conversation. Raises `RequestError`, `ApiError`."""
    return conversation_token_ids(
        turns_of(messages),
        model.tokenizer,
        model.chat_template,
        max_positions=model.max_positions,
        tools=tools,
    )


def _check_format(form: Form) -> None:
    assert form.response_format is not None, "there is one to check"
    try:
        check_grammar(form.response_format)
    except GrammarError as error:
        param = "tools" if form.calls else "response_format"
        raise ApiError(400, str(error), param=param, code="invalid_value") from None


def _prompt_token_ids(prompt: str | tuple[int, ...], model: ApiModel) -> tuple[int, ...]:
    if not isinstance(prompt, str):
        check_token_ids(prompt, model.vocab_size)
        return prompt
    found = text_token_ids(prompt, model.tokenizer, max_positions=model.max_positions)
    if found:
        return found
    # A text that begins here, as with OpenAI.
    tokenizer = model.tokenizer
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if begin is None:
        raise RequestError("the prompt is empty, and the model has no token to begin a text with")
    return (begin,)


def _max_tokens(
    body: Generation, prompt: tuple[int, ...], asked: int | None, name: str, model: ApiModel
) -> int:
    room = model.max_positions - len(prompt)
    if room < 1 or (asked or 1) > room:
        wanted = "" if asked is None else f" and {asked} for the answer ({name})"
        given = "prompt" if isinstance(body, TextCompletion) else "messages"
        raise ApiError(
            400,
            f"the model holds {model.max_positions} tokens; "
            f"the request has {len(prompt)} in its prompt{wanted}",
            param=given if room < 1 else name,
            code="context_length_exceeded",
        )
    return asked or room


def _sampling(body: Generation, max_tokens: int, choice: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        # Negative seeds are OpenAI's too; each is one of 2**64.
        seed=None if body.seed is None else (body.seed + choice) % 2**64,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        min_p=body.min_p or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias,
        logprobs=num_logprobs(body),
    )


def num_logprobs(body: Generation) -> int | None:
    """How many likeliest tokens it wants to know of at each place; None for no probabilities."""
    match body:
        case ChatCompletion():
            return (body.top_logprobs or 0) if body.logprobs else None
        case TextCompletion():
            return body.logprobs
        case _:
            raise TypeError(f"no completion: {type(body).__name__}")
