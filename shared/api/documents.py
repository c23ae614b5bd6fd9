"""Answers as OpenAI's JSON objects: whole ones, and chunks of a stream. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol

from shared.api.ask import Kind
from shared.api.choice import Choice, Piece, Usage
from shared.api.model import ApiModel
from shared.text.logprobs import ShownToken, chat_entry, text_logprobs
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


def whole_document(answer: Answered, whole: Sequence[Piece], model: ApiModel) -> str:
    """The answer to a request that is no stream, as JSON; `whole` has all pieces of each choice.

    Log probabilities are written token by token: as one document of objects they would take
    hundreds of bytes for each number.
    """
    assert answer.usage is not None, "every request has ended"
    choices = [
        _joined(
            {
                **_content(answer, whole[choice.index]),
                "finish_reason": choice.finish_reason,
            },
            "logprobs",
            _logprobs(answer, whole[choice.index].tokens, model),
        )
        for choice in answer.choices
    ]
    kind = "chat.completion" if answer.kind == "chat" else "text_completion"
    document = {**_head(answer, kind, model), "usage": _usage(answer.usage)}
    return _joined(document, "choices", f"[{','.join(choices)}]")


class Chunks:
    """The chunks of one stream as JSON texts."""

    def __init__(self, answer: Answered, model: ApiModel, *, include_usage: bool) -> None:
        self._completion_id = answer.completion_id
        self._answer = answer
        self._model = model
        self._is_chat = answer.kind == "chat"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = _head(answer, kind, model)
        # With usage asked for, each chunk has the field, as with OpenAI.
        self._tail: dict[str, Any] = {"usage": None} if include_usage else {}

    def opening(self, piece: Piece) -> str:
        return self._chunk(piece, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, piece: Piece) -> str:
        if self._is_chat:
            delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
            if piece.calls:
                delta["tool_calls"] = [
                    self._call(piece.index, part) for part in joined_parts(piece.calls)
                ]
            return self._chunk(piece, {"delta": delta})
        return self._chunk(piece, {"text": piece.text})

    def usage(self, usage: Usage) -> str:
        return _dump({**self._head, "choices": [], "usage": _usage(usage)})

    def _call(self, choice: int, part: CallPart) -> dict[str, Any]:
        if not part.name:
            return {"index": part.index, "function": {"arguments": part.arguments}}
        return {"index": part.index, **_tool_call(self._completion_id, choice, part)}

    def _chunk(self, piece: Piece, content: dict[str, Any]) -> str:
        # Those of the tokens that begin in the piece; none in one that only opens or ends.
        logprobs = _logprobs(self._answer, piece.tokens, self._model) if piece.tokens else "null"
        choice = {"index": piece.index, **content, "finish_reason": piece.finish_reason}
        choices = f"[{_joined(choice, 'logprobs', logprobs)}]"
        return _joined({**self._head, **self._tail}, "choices", choices)


def _head(answer: Answered, kind: str, model: ApiModel) -> dict[str, Any]:
    return {
        "id": answer.completion_id,
        "object": kind,
        "created": answer.created_unix_s,
        "model": model.model_name,
        "system_fingerprint": model.fingerprint,
    }


def _content(answer: Answered, whole: Piece) -> dict[str, Any]:
    if answer.kind == "text":
        return {"index": whole.index, "text": whole.text}
    message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
    if whole.calls:
        message["content"] = whole.text or None
        message["tool_calls"] = [
            _tool_call(answer.completion_id, whole.index, part)
            for part in joined_parts(whole.calls)
        ]
    return {"index": whole.index, "message": message}


def _tool_call(completion_id: str, choice: int, part: CallPart) -> dict[str, Any]:
    """Its id depends on its place alone, so that whoever reads it again finds the same."""
    place = f"{completion_id}-{choice}-{part.index}".encode()
    name = hashlib.blake2b(place, digest_size=12, person=b"cellpipe-call").hexdigest()
    return {
        "id": f"call_{name}",
        "type": "function",
        "function": {"name": part.name, "arguments": part.arguments},
    }


def _logprobs(answer: Answered, tokens: list[ShownToken], model: ApiModel) -> str:
    if answer.logprobs is None:
        return "null"
    if answer.kind == "text":
        return _dump(text_logprobs(tokens, model.tokenizer, num_top=answer.logprobs))
    entries = ",".join(_dump(chat_entry(token, model.tokenizer)) for token in tokens)
    return f'{{"content":[{entries}],"refusal":null}}'


def _joined(document: dict[str, Any], name: str, value: str) -> str:
    """A document as JSON, with one more field that is JSON already."""
    return f'{_dump(document)[:-1]},"{name}":{value}}}'


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_prompt + usage.num_generated,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
