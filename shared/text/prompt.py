"""Turns what a request brings into the model's token ids. Knows no queue, sampling or layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import ErrorCode, RequestError
from shared.messages import ChatMessage
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer
from shared.text.tools import Turn, turns_in_words


def chat_token_ids(
    messages: Sequence[ChatMessage],
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    *,
    max_positions: int,
) -> tuple[int, ...]:
    """Token ids of messages of text, as `conversation_token_ids`."""
    turns = [{"role": m.role, "content": m.content} for m in messages]
    return conversation_token_ids(turns, tokenizer, chat_template, max_positions=max_positions)


def conversation_token_ids(
    turns: Sequence[Turn],
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    *,
    max_positions: int,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[int, ...]:
    """Token ids of a conversation, open for the assistant's turn.

    They are those of Hugging Face's template and tokenizer, but for names of control tokens in what
    users wrote, which are ordinary characters. A template that knows no tools is told of them in
    words. Raises `RequestError` when the model has no chat template, the template refuses, or the
    text is too long for `max_positions` whatever its tokens are.
    """
    if chat_template is None:
        raise RequestError(
            "messages were given, but the model has no chat template",
            remedy="send a prompt instead",
            param="messages",
        )
    if len(turns) >= max_positions:  # rendering them takes seconds, and each takes a token
        raise RequestError(
            f"the conversation has {len(turns)} messages, and the model holds {max_positions} "
            "positions including the answer",
            code=ErrorCode.CONTEXT_LENGTH,
            param="messages",
        )
    if not chat_template.knows_tools:
        turns, tools = turns_in_words(turns, tools), ()
    guard, written = tokenizer.guard, [turns, tools]
    if not guard.finds_any(written):
        text = chat_template.render_turns(turns, tools=tools)
        _check_length(text, tokenizer, max_positions, param="messages")
        return tuple(tokenizer.encode(text, parse_special=True))
    mark = guard.free_mark([written, chat_template.source])
    turns, tools = guard.marked(turns, mark), guard.marked(tools, mark)
    text = chat_template.render_turns(turns, tools=tools)
    _check_length(text, tokenizer, max_positions, param="messages")
    token_ids: list[int] = []
    for piece, is_special in guard.pieces(text, mark):
        token_ids += tokenizer.encode(piece, parse_special=is_special, continues=bool(token_ids))
    return tuple(token_ids)


def text_token_ids(text: str, tokenizer: Tokenizer, *, max_positions: int) -> tuple[int, ...]:
    """Token ids of a raw prompt, in which names of control tokens are ordinary characters.

    They begin with the beginning-of-sequence token if the model wants one.

    Raises `RequestError` for one that is too long for `max_positions` whatever its tokens are.
    """
    _check_length(text, tokenizer, max_positions, param="prompt")
    return tuple(tokenizer.encode(text, parse_special=False, add_bos=True))


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `RequestError` for an id that the model does not have."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token_ids must be in 0..{vocab_size - 1}, got {token_id}", param="token_ids"
            )


def _check_length(text: str, tokenizer: Tokenizer, max_positions: int, *, param: str) -> None:
    """Refuse what is too long whatever its tokens are, before the seconds that tokenising takes.

    Nobody else is served in that time: 5 MB took 14 s.
    """
    at_least = len(text) // tokenizer.max_token_bytes
    if at_least >= max_positions:
        raise RequestError(
            f"the prompt has {len(text)} characters, at least {at_least} tokens, and the model "
            f"holds {max_positions} positions including the answer",
            code=ErrorCode.CONTEXT_LENGTH,
            param=param,
        )
