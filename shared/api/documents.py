"""Answers as OpenAI's JSON objects: whole ones, and chunks of a stream. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from shared.api.ask import Kind
from shared.api.choice import Choice, Piece, Usage
from shared.api.model import ApiModel
from shared.text.logprobs import ShownToken, chat_logprobs, text_logprobs
from shared.text.tool_calls import CallPart, joined_parts


class Answered(Protocol):
    """What is told of an answer. `usage` None: it still runs. `logprobs`: how many likeliest
    tokens it is to tell of, None for no probabilities."""

    @property
    def completion_id(self) -> str: ...

    @property
    def choices(self) -> Sequence[Choice]: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def created_unix_s(self) -> int: ...

    @property
    def logprobs(self) -> int | None: ...

    @property
    def usage(self) -> Usage | None: ...


def whole_document(answer: Answered, pieces: Sequence[Piece], model: ApiModel) -> dict[str, Any]:
    """The answer to a request that is no stream, from the pieces of all choices."""
    assert answer.usage is not None, "every request has ended"
    choices = [
        _choice(answer, choice, [p for p in pieces if p.index == choice.index], model)
        for choice in answer.choices
    ]
    kind = "chat.completion" if answer.kind == "chat" else "text_completion"
    return {**_head(answer, kind, model), "choices": choices, "usage": _usage(answer.usage)}


class Chunks:
    """The chunks of one stream as JSON texts."""

    def __init__(self, answer: Answered, model: ApiModel, *, include_usage: bool) -> None:
        self._answer = answer
        self._model = model
        self._is_chat = answer.kind == "chat"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = _head(answer, kind, model)
        # With usage asked for, each chunk has the field, as with OpenAI.
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    def opening(self, piece: Piece) -> str:
        return self._chunk(piece, {"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> str:
        if self._is_chat:
            delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
            if piece.calls:
                delta["tool_calls"] = [
                    self._call(piece.index, part) for part in joined_parts(piece.calls)
                ]
            return self._chunk(piece, delta)
        return _dump(
            {
                **self._head,
                "choices": [
                    {
                        "index": piece.index,
                        "text": piece.text,
                        "logprobs": self._logprobs(piece),
                        "finish_reason": piece.finish_reason,
                    }
                ],
                **self._tail,
            }
        )

    def usage(self, usage: Usage) -> str:
        return _dump({**self._head, "choices": [], "usage": _usage(usage)})

    def _call(self, choice: int, part: CallPart) -> dict[str, Any]:
        if not part.name:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        return {"index": part.index, **_tool_call(self._answer.completion_id, choice, part)}

    def _chunk(self, piece: Piece, delta: dict[str, Any]) -> str:
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        return _dump({**self._head, "choices": [choice], **self._tail})

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Those of the tokens that begin in the piece; none in one that only opens or ends."""
        return _logprobs(self._answer, piece.tokens, self._model) if piece.tokens else None


def _head(answer: Answered, kind: str, model: ApiModel) -> dict[str, Any]:
    return {
        "id": answer.completion_id,
        "object": kind,
        "created": answer.created_unix_s,
        "model": model.model_name,
        "system_fingerprint": model.fingerprint,
    }


def _choice(
    answer: Answered, choice: Choice, pieces: list[Piece], model: ApiModel
) -> dict[str, Any]:
    text = "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    document: dict[str, Any] = {"index": choice.index}
    if answer.kind == "text":
        document["text"] = text
    else:
        document["message"] = {"role": "assistant", "content": text, "refusal": None}
        parts = joined_parts([part for piece in pieces for part in piece.calls])
        if parts:
            document["message"] |= {
                "content": text or None,
                "tool_calls": [
                    _tool_call(answer.completion_id, choice.index, part) for part in parts
                ],
            }
    document["logprobs"] = _logprobs(answer, tokens, model)
    return {**document, "finish_reason": choice.finish_reason}


def _tool_call(completion_id: str, choice: int, part: CallPart) -> dict[str, Any]:
    """Its id depends on its place alone, so that whoever reads it again finds the same."""
    place = f"{completion_id}-{choice}-{part.index}".encode()
    name = hashlib.blake2b(place, digest_size=12, person=b"cellpipe-call").hexdigest()
    return {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }


def _logprobs(answer: Answered, tokens: list[ShownToken], model: ApiModel) -> dict[str, Any] | None:
    if answer.logprobs is None:
        return None
    if answer.kind == "chat":
        return chat_logprobs(tokens, model.tokenizer)
    return text_logprobs(tokens, model.tokenizer, num_top=answer.logprobs)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_prompt + usage.num_generated,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
