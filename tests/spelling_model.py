"""A model that says a text: whatever the prompt, its last token decides which one comes next.

Its layers add nothing, and the row of a token in the head is the embedding of the token before it.
"""

from __future__ import annotations

from pathlib import Path

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
    return write_gguf(path, TinyModel(tied=False, context=context, tensors=tensors))


def byte_token(byte: int) -> int:
    """The token that stands for a byte."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    char = chr(byte) if byte in visible else None
    if char is None:
        hidden = [b for b in range(256) if b not in visible]
        char = chr(256 + hidden.index(byte))
    assert char in byte_alphabet()
    return tiny_tokens().index(char)
