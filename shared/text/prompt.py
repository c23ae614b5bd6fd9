"""Turns what a request brings into the model's token ids. Knows no queue, sampling or layout."""

from __future__ import annotations

from collections.abc import Sequence

from shared.errors import RequestError
from shared.messages import ChatMessage
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer


def chat_token_ids(
    messages: Sequence[ChatMessage],
    tokenizer: Tokenizer,
    chat_template: ChatTemplate | None,
    *,
    max_positions: int,
) -> tuple[int, ...]:
    """Token ids of a conversation, open for the assistant's turn.

    Raises `RequestError` when the model has no chat template, the template refuses, or the text is
    too long for `max_positions` whatever its tokens are.
    """
    if chat_template is None:
        raise RequestError(
            "messages were given, but the model has no chat template",
            remedy="send a prompt instead",
        )
    if len(messages) >= max_positions:  # rendering them takes seconds, and each takes a token
        raise RequestError(
            f"the conversation has {len(messages)} messages, and the model holds {max_positions} "
            "positions including the answer"
        )
    text = chat_template.render(messages, add_generation_prompt=True)
    _check_length(text, tokenizer, max_positions)
    return tuple(tokenizer.encode(text, parse_special=True))


def text_token_ids(text: str, tokenizer: Tokenizer, *, max_positions: int) -> tuple[int, ...]:
    """Token ids of a raw prompt, in which names of control tokens are ordinary characters.

    Raises `RequestError` for one that is too long for `max_positions` whatever its tokens are.
    """
    _check_length(text, tokenizer, max_positions)
    return tuple(tokenizer.encode(text, parse_special=False))


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise `RequestError` for an id that the model does not have."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"token_ids must be in 0..{vocab_size - 1}, got {token_id}")


def _check_length(text: str, tokenizer: Tokenizer, max_positions: int) -> None:
    """Refuse what is too long whatever its tokens are, before the seconds that tokenising takes.

    Nobody else is served in that time: 5 MB took 14 s.
    """
    at_least = len(text) // tokenizer.max_token_bytes
    if at_least >= max_positions:
        raise RequestError(
            f"the prompt has {len(text)} characters, at least {at_least} tokens, and the model "
            f"holds {max_positions} positions including the answer"
        )
