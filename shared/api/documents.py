"""Answers as OpenAI's JSON objects: whole ones, and chunks of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from shared.api.ask import Kind
from shared.api.choice import Choice, Piece, Usage
from shared.api.model import ApiModel


class Answered(Protocol):
    """What is told of an answer. `usage` None: it still runs."""

    @property
    def completion_id(self) -> str: ...

    @property
    def choices(self) -> Sequence[Choice]: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def created_unix_s(self) -> int: ...

    @property
    def usage(self) -> Usage | None: ...


def whole_document(answer: Answered, texts: Sequence[str], model: ApiModel) -> dict[str, Any]:
    """The answer to a request that is no stream."""
    assert answer.usage is not None, "every request has ended"
    choices = [
        _choice(answer, choice.index, texts[choice.index], choice.finish_reason)
        for choice in answer.choices
    ]
    kind = "chat.completion" if answer.kind == "chat" else "text_completion"
    return {**_head(answer, kind, model), "choices": choices, "usage": _usage(answer.usage)}


class Chunks:
    """The chunks of one stream as JSON texts."""

    def __init__(self, answer: Answered, model: ApiModel, *, include_usage: bool) -> None:
        self._is_chat = answer.kind == "chat"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = _head(answer, kind, model)
        # With usage asked for, each chunk has the field, as with OpenAI.
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    def opening(self, piece: Piece) -> str:
        return self._chunk(piece.index, {"role": "assistant", "content": ""}, None)

    def piece(self, piece: Piece) -> str:
        if self._is_chat:
            delta = {"content": piece.text} if piece.text else {}
            return self._chunk(piece.index, delta, piece.finish_reason)
        return _dump(
            {
                **self._head,
                "choices": [
                    {
                        "index": piece.index,
                        "text": piece.text,
                        "logprobs": None,
                        "finish_reason": piece.finish_reason,
                    }
                ],
                **self._tail,
            }
        )

    def usage(self, usage: Usage) -> str:
        return _dump({**self._head, "choices": [], "usage": _usage(usage)})

    def _chunk(self, index: int, delta: dict[str, str], finish_reason: str | None) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return _dump({**self._head, "choices": [choice], **self._tail})


def _head(answer: Answered, kind: str, model: ApiModel) -> dict[str, Any]:
    return {
        "id": answer.completion_id,
        "object": kind,
        "created": answer.created_unix_s,
        "model": model.model_name,
        "system_fingerprint": model.fingerprint,
    }


def _choice(answer: Answered, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    if answer.kind == "text":
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": None, "finish_reason": finish_reason}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_prompt + usage.num_generated,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
