"""The tokenizer in a GGUF file's metadata: what is said, what is meant, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.formats.gguf_file import GgufFile
from shared.formats.gguf_vocabulary import read_gguf_vocabulary
from shared.text.tokenizer import Tokenizer
from shared.text.vocabulary import Vocabulary

TOKENS = ["<unk>", "<s>", "</s>", "\u2581", "a", "\u2581a"]
LLAMA: dict[str, Any] = {
    "model": "llama",
    "tokens": TOKENS,
    "token_type": [2, 3, 3, 1, 1, 1],
    "scores": [0.0, 0.0, 0.0, -2.0, -3.0, -1.0],
}
GPT2: dict[str, Any] = {
    "model": "gpt2",
    "pre": "llama-bpe",
    "tokens": ["<s>", "a", "b", "ab"],
    "token_type": [3, 1, 1, 1],
    "merges": ["a b"],
}


def read(said: dict[str, Any]) -> Vocabulary:
    metadata = {f"tokenizer.ggml.{key}": value for key, value in said.items() if value is not None}
    return read_gguf_vocabulary(GgufFile(Path("m.gguf"), metadata, {}), len(said["tokens"]))


def test_what_a_sentencepiece_file_does_not_say_is_as_llama_cpp_has_it() -> None:
    vocabulary = read(LLAMA)

    assert (vocabulary.bos_token_id, vocabulary.eos_token_id) == (1, 2)
    assert vocabulary.add_bos
    assert vocabulary.add_space_prefix
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    assert tokenizer.encode("a aa", parse_special=False, add_bos=True) == [1, 5, 5, 4]


def test_what_it_says_counts() -> None:
    said = {"add_bos_token": False, "add_space_prefix": False, "bos_token_id": 2, "eos_token_id": 1}

    vocabulary = read(LLAMA | said)

    assert (vocabulary.bos_token_id, vocabulary.eos_token_id) == (2, 1)
    tokenizer = Tokenizer.from_vocabulary(vocabulary)
    assert tokenizer.encode("a aa", parse_special=False, add_bos=True) == [4, 5, 4]


def test_whether_a_byte_level_prompt_begins_with_a_token_depends_on_its_pre_tokenizer() -> None:
    assert read(GPT2 | {"bos_token_id": 0}).add_bos
    assert not read(GPT2 | {"pre": "qwen2"}).add_bos
    assert not read(GPT2 | {"pre": None}).add_bos
    assert read(GPT2 | {"pre": None}).pre == "default"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (LLAMA | {"scores": None}, "tokenizer.ggml.scores must be an array of float"),
        (LLAMA | {"scores": [0.0]}, "tokenizer.ggml.scores has 1 of 6 entries"),
        (LLAMA | {"scores": [float("nan")] * 6}, r"tokenizer.ggml.scores\[0\] is nan"),
        (LLAMA | {"token_type": [1]}, "tokenizer.ggml.token_type has 1 of 6 entries"),
        (LLAMA | {"model": None}, "tokenizer.ggml.model is missing"),
        (LLAMA | {"model": 3}, "tokenizer.ggml.model must be str, got 3"),
        (LLAMA | {"eos_token_id": 6}, r"special token id 6 \(eos\) is outside"),
        (LLAMA | {"eot_token_id": 6}, r"special token id 6 \(eot\) is outside"),
        (LLAMA | {"add_bos_token": 1}, "add_bos_token must be bool, got 1"),
        (GPT2 | {"merges": None}, "tokenizer.ggml.merges must be an array of str"),
    ],
)
def test_metadata_that_cannot_be_used_is_refused_by_name(
    said: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(said)
