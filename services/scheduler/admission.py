"""Turns a request into what will run, or says why it cannot. Pure: no queue, no store, no clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shared.errors import ErrorCode, RequestError
from shared.messages import Request, SamplingParams, Step
from shared.model.config import ModelConfig
from shared.model_names import is_called
from shared.text.chat_template import ChatTemplate
from shared.text.constraint import check_grammar
from shared.text.prompt import chat_token_ids, check_token_ids, text_token_ids
from shared.text.response_format import ResponseFormat
from shared.text.tokenizer import Tokenizer
from shared.topology import Layout


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the scheduler knows it."""

    layout: Layout
    config: ModelConfig
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


@dataclass(frozen=True, slots=True)
class Plan:
    """An admitted request: P prompt tokens, and the last position that a token may take."""

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    max_position: int
    stop_token_ids: tuple[int, ...]
    deadline_unix_ms: int
    response_format: ResponseFormat | None = None


def plan_request(request: Request, model: ServedModel, *, draw_seed: Callable[[str], int]) -> Plan:
    """Tokenise and bound a request. Raises `RequestError` naming the field and the value.

    A missing seed is drawn once, here; from then on the same plan gives the same tokens.
    """
    if request.model and not is_called(model.layout.model_id, request.model):
        raise RequestError(
            f"model {request.model!r} is not served here",
            remedy=f"the model that is loaded is {model.layout.model_id}",
            code=ErrorCode.MODEL_NOT_FOUND,
            param="model",
        )
    token_ids = _prompt_tokens(request, model)
    limit = model.config.max_position_embeddings
    if len(token_ids) >= limit:
        raise RequestError(
            f"the prompt has {len(token_ids)} tokens, and the model holds {limit} positions "
            "including the answer",
            code=ErrorCode.CONTEXT_LENGTH,
            param=_input_of(request),
        )
    if request.response_format is not None:
        _check_format(request.response_format, request.sampling, model)
    sampling = request.sampling
    for token_id, _ in sampling.logit_bias:
        if token_id >= model.config.vocab_size:
            raise RequestError(
                f"logit_bias names token {token_id}; "
                f"the model has 0..{model.config.vocab_size - 1}",
                param="logit_bias",
            )
    if sampling.seed is None:
        sampling = replace(sampling, seed=draw_seed(request.request_id))
    return Plan(
        request_id=request.request_id,
        token_ids=token_ids,
        sampling=sampling,
        max_position=min(len(token_ids) + sampling.max_tokens, limit) - 1,
        stop_token_ids=model.config.eos_token_ids,
        deadline_unix_ms=request.deadline_unix_ms,
        response_format=request.response_format,
    )


def seed_of(request_id: str) -> int:
    """The seed of a request that brings none, 63 bits.

    Made from its id: should the store lose all of it and it is admitted anew, what still runs of
    it draws the same tokens, and none that its reader has seen is contradicted.
    """
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"cellpipe-seed").digest()
    return int.from_bytes(digest, "big") >> 1


def first_step(
    plan: Plan,
    layout: Layout,
    *,
    epoch: int,
    position: int = 0,
    generated: Sequence[int] = (),
    is_batch: bool = False,
) -> Step:
    """The one message that starts or revives a request: its tokens from `position` on, for group 0.

    `generated` are the tokens that are committed; the KV rows before `position` are stored.
    """
    token_ids = [*plan.token_ids, *generated][position:]
    return Step(
        request_id=plan.request_id,
        model_id=layout.model_id,
        layout_id=layout.layout_id,
        group=0,
        epoch=epoch,
        position=position,
        sample=True,
        max_position=plan.max_position,
        tensors={"token_ids": np.array(token_ids, dtype=np.int32)},
        sampling=plan.sampling.of_steps(),
        stop_token_ids=plan.stop_token_ids,
        deadline_unix_ms=plan.deadline_unix_ms,
        is_batch=is_batch,
        shaped=plan.sampling.shapes_logits or plan.response_format is not None,
    )


def kv_bytes(plan: Plan, config: ModelConfig) -> int:
    """Bytes of KV rows that a request may come to: prompt and answer in all layers.

    The last token of the longest answer is never fed back, so it needs no row.
    """
    return plan.max_position * kv_bytes_per_position(config)


def kv_bytes_per_position(config: ModelConfig) -> int:
    """Bytes of the KV rows of one position in all layers."""
    return config.num_hidden_layers * config.kv_row_bytes_per_layer


def check_kv_bytes(plan: Plan, config: ModelConfig, max_bytes: int | None) -> None:
    """Raise `RequestError` for a request that could never fit into a budget; None is none."""
    needed = kv_bytes(plan, config)
    if max_bytes is not None and needed > max_bytes:
        raise RequestError(
            f"the request may need {needed} bytes of KV memory for {plan.max_position} positions, "
            f"and the scheduler's budget is {max_bytes} bytes",
            remedy="ask for fewer max_tokens, or raise it: cellpipe scheduler --kv-budget",
            code=ErrorCode.KV_MEMORY,
            param="max_tokens",
        )


def check_workers_bytes(plan: Plan, config: ModelConfig, max_bytes: int | None) -> None:
    """Raise `RequestError` for a request whose rows no worker has the memory for; None is any."""
    needed = kv_bytes(plan, config)
    if max_bytes is not None and needed > max_bytes:
        raise RequestError(
            f"the request may need {needed} bytes of KV memory for {plan.max_position} positions, "
            f"and the workers have room for {max_bytes} bytes of one request",
            remedy="ask for fewer max_tokens, or give workers more: cellpipe worker --memory",
            code=ErrorCode.KV_MEMORY,
            param="max_tokens",
        )


def _check_format(wanted: ResponseFormat, sampling: SamplingParams, model: ServedModel) -> None:
    if sampling.ignore_eos:
        raise RequestError("ignore_eos goes with text alone: JSON has an end", param="ignore_eos")
    if not model.config.eos_token_ids:
        raise RequestError(
            "response_format needs a model with a token that ends an answer",
            param="response_format",
        )
    check_grammar(wanted)


def _input_of(request: Request) -> str:
    """The field that holds what a request begins with."""
    if request.token_ids is not None:
        return "token_ids"
    return "prompt" if request.messages is None else "messages"


def _prompt_tokens(request: Request, model: ServedModel) -> tuple[int, ...]:
    if request.token_ids is not None:
        check_token_ids(request.token_ids, model.config.vocab_size)
        return request.token_ids
    limit = model.config.max_position_embeddings
    if request.messages is not None:
        token_ids = chat_token_ids(
            request.messages, model.tokenizer, model.chat_template, max_positions=limit
        )
    else:
        assert request.prompt is not None, "a Request holds exactly one of its three inputs"
        token_ids = text_token_ids(request.prompt, model.tokenizer, max_positions=limit)
    if not token_ids:
        raise RequestError("the prompt has no tokens", param=_input_of(request))
    return token_ids
