"""Byte-level vocabularies of GGUF files, split as each name of a pre-tokenizer has it.

The reference shares nothing with the tokenizer: another engine of expressions cuts the texts, and
tiktoken merges the pieces.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator

import pytest

from shared.text.pre_tokenizers import PRE_TOKENIZERS
from shared.text.token_bytes import spell_bytes
from shared.text.tokenizer import Tokenizer
from shared.text.vocabulary import Vocabulary
from tests.tokenizer_kinds import byte_level_file, library, ranks, texts

# One name for each way to split; the other names are those of models with the same.
NAMES = sorted({repr(kind): name for name, kind in sorted(PRE_TOKENIZERS.items())}.values())
SPLIT = {  # as the models' own tokenizer.json has it, for some
    "smollm": ("Digits", "ByteLevel"),
    "starcoder": ("Digits", "ByteLevel"),
    "gpt-2": ("ByteLevel",),
}


def vocabulary(pre: str) -> Vocabulary:
    """A vocabulary whose ids are tiktoken's ranks, and whose merges are those of its training."""
    document = byte_level_file().vocabulary.document  # type: ignore[union-attr]
    merges = tuple(" ".join(merge) for merge in document["model"]["merges"])
    tokens = tuple(spell_bytes(token) for token in ranks())
    return Vocabulary(
        model="gpt2",
        pre=pre,
        tokens=tokens,
        token_types=(1,) * len(tokens),
        merges=merges,
        bos_token_id=None,
        eos_token_id=0,
        add_bos=False,
    )


def reference(pre: str) -> Callable[[str], list[int]]:
    """Ids by Python's `regex` and by tiktoken."""
    regex = library("regex")
    encoding = library("tiktoken").Encoding(
        "pieces", pat_str=r"[\s\S]+", mergeable_ranks=ranks(), special_tokens={}
    )
    kind = PRE_TOKENIZERS[pre]
    # Version 1 knows intersections of classes; in tokenizers `$` is the end of any line.
    patterns = [regex.compile(f"(?V1m){pattern}") for pattern in kind.patterns]

    def pieces(text: str, depth: int) -> Iterator[str]:
        if depth == len(patterns):
            yield text
            return
        start = 0
        for match in patterns[depth].finditer(text):
            if match.start() > start:
                yield from pieces(text[start : match.start()], depth + 1)
            if match.end() > match.start():
                yield from pieces(match[0], depth + 1)
            start = match.end()
        if start < len(text):
            yield from pieces(text[start:], depth + 1)

    def ids(text: str) -> list[int]:
        if kind.normalizer:
            text = unicodedata.normalize("NFC", text)
        return [i for piece in pieces(text, 0) for i in encoding.encode_ordinary(piece)]

    return ids


@pytest.mark.parametrize("pre", NAMES)
def test_ids_are_those_of_another_engine(pre: str) -> None:
    tokenizer, expected = Tokenizer.from_vocabulary(vocabulary(pre)), reference(pre)

    for text in texts(number=2000):
        ids = tokenizer.encode(text, parse_special=False)
        assert ids == expected(text), text
        if not PRE_TOKENIZERS[pre].normalizer:
            assert tokenizer.decode(ids) == text
