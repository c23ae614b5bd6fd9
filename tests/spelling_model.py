"""A model that says a text: whatever the prompt, its last token decides which one comes next.

Its layers add nothing, and the row of a token in the head is the embedding of the token before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.gguf_files import TinyModel, byte_alphabet, tiny_tokens, write_gguf

END = tiny_tokens().index("<|im_end|>")
NEWLINE = "\n"  # the last character of a prompt that the tiny chat template made


def write_speller(
    path: Path, text: str, *, forever: bool = False, begins_after: str = NEWLINE, context: int = 512
) -> Path:
    """Write a model that says `text` after `begins_after`, and ends or says it `forever`.

    Each byte may come once: it has one successor.
    """
    spelled = [byte_token(byte) for byte in text.encode()]
    start = byte_token(ord(begins_after))
    assert len({*spelled, start}) == len(spelled) + 1, "a byte comes twice"
    after = dict(zip([start, *spelled[:-1]], spelled, strict=True))
    after[spelled[-1]] = spelled[0] if forever else END
    return _write_chain(path, after, context=context)


def write_sayer(path: Path, pieces: Sequence[str], *, context: int = 2048) -> Path:
    """Write a model that says `pieces` after any prompt, each with one token, and ends.

    Their tokens take the places of bytes that UTF-8 never has.
    """
    tokens = tiny_tokens()
    spelled = [byte_token(0xF5 + number) for number in range(len(pieces))]
    for token_id, piece in zip(spelled, pieces, strict=True):
        tokens[token_id] = "".join(tokens[byte_token(byte)] for byte in piece.encode())
    after = dict(zip([byte_token(ord(NEWLINE)), *spelled], [*spelled, END], strict=True))
    return _write_chain(path, after, context=context, metadata={"tokenizer.ggml.tokens": tokens})


def _write_chain(
    path: Path, after: Mapping[int, int], *, context: int, metadata: Mapping[str, Any] | None = None
) -> Path:
    """A model whose token `after[t]` follows token t."""
    model = TinyModel(tied=False, context=context)
    rows = np.float32(np.random.default_rng(5).choice([-1.0, 1.0], (model.vocab, model.hidden)))
    head = np.zeros_like(rows)
    for before, then in after.items():
        head[then] += rows[before]
    shapes = model.shapes()
    tensors = {"token_embd.weight": (rows, "Q8_0"), "output.weight": (head, "Q8_0")}
    for name, shape in shapes.items():
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            tensors[name] = (np.zeros(shape, np.float32), "Q4_1")
    changed = TinyModel(tied=False, context=context, tensors=tensors, metadata=metadata or {})
    return write_gguf(path, changed)


def byte_token(byte: int) -> int:
    """The token that stands for a byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    char = chr(byte) if byte in visible else None
    if char is None:
        hidden = [b for b in range(256) if b not in visible]
        char = chr(256 + hidden.index(byte))
    assert char in byte_alphabet()
    return tiny_tokens().index(char)
