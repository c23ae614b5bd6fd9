"""Answers as OpenAI's JSON objects: whole ones, and chunks of a stream. Pure."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from services.gateway.answer import Answer, Piece, Usage
from services.gateway.backend import Backend
from services.gateway.choice import Choice
from services.gateway.note import Note
from shared.text.logprobs import ShownToken, chat_logprobs, text_logprobs
from shared.text.tool_calls import CallPart, joined_parts


def whole_document(answer: Answer, pieces: list[Piece], backend: Backend) -> dict[str, Any]:
    """The answer to a request that is no stream, from the pieces of all choices."""
    assert answer.usage is not None, "every request has ended"
    choices = [
        _choice(answer, choice, [p for p in pieces if p.index == choice.index], backend)
        for choice in answer.choices
    ]
    kind = "chat.completion" if answer.note.kind == "chat" else "text_completion"
    return {**_head(answer, kind, backend), "choices": choices, "usage": _usage(answer.usage)}


class Chunks:
    """The chunks of one stream as JSON texts."""

    def __init__(self, answer: Answer, backend: Backend) -> None:
        self._completion_id = answer.completion_id
        self._note = answer.note
        self._backend = backend
        self._is_chat = answer.note.kind == "chat"
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        self._head = _head(answer, kind, backend)
        # With usage asked for, each chunk has the field, as with OpenAI.
        self._tail: dict[str, Any] = {"usage": None} if answer.note.include_usage else {}

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
        return {"index": part.index, **_tool_call(self._completion_id, choice, part)}

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
        return _logprobs(self._note, piece.tokens, self._backend) if piece.tokens else None


def _head(answer: Answer, kind: str, backend: Backend) -> dict[str, Any]:
    return {
        "id": answer.completion_id,
        "object": kind,
        "created": answer.note.created_unix_s,
        "model": backend.model_name,
        "system_fingerprint": backend.fingerprint,
    }


def _choice(
    answer: Answer, choice: Choice, pieces: list[Piece], backend: Backend
) -> dict[str, Any]:
    text = "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    document: dict[str, Any] = {"index": choice.index}
    if answer.note.kind == "text":
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
    document["logprobs"] = _logprobs(answer.note, tokens, backend)
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


def _logprobs(note: Note, tokens: list[ShownToken], backend: Backend) -> dict[str, Any] | None:
    if note.logprobs is None:
        return None
    if note.kind == "chat":
        return chat_logprobs(tokens, backend.tokenizer)
    return text_logprobs(tokens, backend.tokenizer, num_top=note.logprobs)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_generated,
        "total_tokens": usage.num_prompt + usage.num_generated,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached},
    }


def _dump(document: dict[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))
