"""Answers as OpenAI's JSON objects: whole ones, and chunks of a stream. Pure."""

from __future__ import annotations

import json
from typing import Any

from services.gateway.answer import Answer, Piece, Usage
from services.gateway.backend import Backend
from services.gateway.note import Note
from shared.text.logprobs import ShownToken, chat_logprobs, text_logprobs


def whole_document(
    answer: Answer, texts: list[str], tokens: list[list[ShownToken]], backend: Backend
) -> dict[str, Any]:
    """The answer to a request that is no stream: text and tokens of each choice."""
    assert answer.usage is not None, "every request has ended"
    choices = [
        {
            **_content(answer, choice.index, texts[choice.index]),
            "logprobs": _logprobs(answer.note, tokens[choice.index], backend),
            "finish_reason": choice.finish_reason,
        }
        for choice in answer.choices
    ]
    kind = "chat.completion" if answer.note.kind == "chat" else "text_completion"
    return {**_head(answer, kind, backend), "choices": choices, "usage": _usage(answer.usage)}


class Chunks:
    """The chunks of one stream as JSON texts."""

    def __init__(self, answer: Answer, backend: Backend) -> None:
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
            delta = {"content": piece.text} if piece.text else {}
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

    def _chunk(self, piece: Piece, delta: dict[str, str]) -> str:
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


def _content(answer: Answer, index: int, text: str) -> dict[str, Any]:
    if answer.note.kind == "text":
        return {"index": index, "text": text}
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message}


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
