"""The tokenizer shard: tokenizer and chat template as one JSON document. Knows no store."""

from __future__ import annotations

import json

from shared.errors import ModelError
from shared.text.chat_template import ChatTemplate
from shared.text.tokenizer import Tokenizer


def write_text_document(tokenizer: Tokenizer, chat_template: str | None) -> bytes:
    """The shard's bytes; equal input gives equal bytes. Raises `ModelError` for a bad template."""
    if chat_template is not None:
        ChatTemplate(chat_template)
    document = {**json.loads(tokenizer.to_json()), "chat_template": chat_template}
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def read_text_document(raw: bytes) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template (None if the model has none) of a shard.

    Raises `ModelError` for bytes that `write_text_document` did not write.
    """
    try:
        document = json.loads(raw)
        source = document.pop("chat_template")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"the tokenizer shard cannot be read: {error!s:.200}") from error
    tokenizer = Tokenizer(document)
    if source is None:
        return tokenizer, None
    if not isinstance(source, str):
        raise ModelError(f"the tokenizer shard's chat_template is a {type(source).__name__}")
    return tokenizer, ChatTemplate(
        source,
        bos_token=tokenizer.token_text(tokenizer.bos_token_id),
        eos_token=tokenizer.token_text(tokenizer.eos_token_id),
    )
