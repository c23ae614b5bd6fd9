"""A tiny tokenizer of every kind, and texts to hold them against what defines each kind."""

from __future__ import annotations

import json
import random
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from types import ModuleType
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from shared.text.tiktoken_json import tiktoken_json
from shared.text.token_bytes import token_table
from shared.text.tokenizer import Tokenizer
from shared.text.vocabulary import AnyVocabulary, TokenizerFile, TokenType, Vocabulary

CORPUS = (
    "The workers take a step from their queue, and the rows of each lie in the store.\n",
    "def step(self, turn: int) -> None:\n    self.rows[turn] = 12345 + 67 * 890\n\n",
    "It's what they'd call Größe, naïveté or señor; we'll see that THE END isn't near.\n",
    "Прежде всего слова. 漢字かな交じり文 と 가나다. مرحبا بالعالم 🐇🚀\n",
) * 8
LLAMA3_SPLIT = (  # meta-llama/Meta-Llama-3-8B, tokenizer.json
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+"
    "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
SPECIAL = ("<s>", "</s>", "<|turn|>")
WORD = "<tool_call>"  # added, but text
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]
MARK = "\u2581"


@cache
def texts(seed: int = 7, number: int = 10_000) -> tuple[str, ...]:
    """Random strings: words, scripts, white space, and characters of all planes.

    The characters have had their category since Unicode 3.2, so that engines of different
    versions of Unicode agree on them. U+2581, which some tokenizers take for a space, is in none.
    """
    rng = random.Random(seed)
    old = unicodedata.ucd_3_2_0
    stable = [
        char
        for char in map(chr, [*range(0x3400), *range(0xA000, 0xA490), *range(0xE000, 0x10800)])
        if old.category(char) == unicodedata.category(char) not in ("Cn", "Cs") and char != MARK
    ]
    words = [word for line in CORPUS[:4] for word in line.split(" ")]
    spaces = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "   \n", "\u3000"]
    ascii_chars = [chr(code) for code in range(1, 127)]
    runs = [char * length for char in (" ", "\n", "a", "-") for length in (3, 8, 17, 31, 40)]
    parts = (
        stable,
        words,
        spaces,
        runs,
        ascii_chars,
        ["'s", "'LL", "007", "1234567", "<|", "|>", "e\u0301"],
    )
    return tuple(
        "".join(rng.choice(rng.choice(parts)) for _ in range(rng.randrange(24)))
        for _ in range(number)
    )


@dataclass(frozen=True)
class Kind:
    """`reference` gives the ids of a text without control tokens; `decoded` what decoding its ids
    gives, None where the kind loses that text."""

    name: str
    vocabulary: AnyVocabulary
    reference: Callable[[str], list[int]]
    decoded: Callable[[str], str | None] = lambda text: text

    def tokenizer(self) -> Tokenizer:
        return _tokenizer(self.name)


@cache
def _tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_vocabulary(KINDS[name]().vocabulary)


def library(name: str) -> ModuleType:
    """A reference library, or a skipped test where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of SWIG, at the import of sentencepiece
        return pytest.importorskip(name)


@cache
def byte_level_file() -> Kind:
    """As Llama 3's and Qwen's: byte-level, normalised, with added tokens after the vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = tokenizers.Regex(LLAMA3_SPLIT)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, trainers.BpeTrainer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    document = json.loads(tokenizer.to_str())
    _add(document, len(document["model"]["vocab"]))
    return _file_kind("byte_level_file", document, lambda s: unicodedata.normalize("NFC", s))


@cache
def byte_fallback_file() -> Kind:
    """As Llama 2's: marks for spaces, one before each text, and bytes for what has no token."""
    document = _space_mark_document(models.BPE(), trainers.BpeTrainer)
    document["normalizer"] = _sequence(
        "normalizers",
        {"type": "Prepend", "prepend": MARK},
        {"type": "Replace", "pattern": {"String": " "}, "content": MARK},
    )
    document["pre_tokenizer"] = None
    return _file_kind("byte_fallback_file", document)


@cache
def metaspace_file() -> Kind:
    """As Mistral's newer ones: a mark before the first piece of a prompt alone."""
    document = _space_mark_document(models.BPE(), trainers.BpeTrainer)
    document["pre_tokenizer"] = _metaspace("first")
    return _file_kind("metaspace_file", document, _unless_space_first)


@cache
def unigram_file() -> Kind:
    """Unigram with byte fallback, which knows the names of its control tokens as pieces."""
    document = _space_mark_document(models.Unigram(), trainers.UnigramTrainer)
    document["pre_tokenizer"] = _metaspace("always")
    return _file_kind("unigram_file", document, _unless_space_first)


@cache
def ranks() -> dict[bytes, int]:
    """A byte-level vocabulary as tiktoken has it."""
    vocabulary = byte_level_file().vocabulary
    assert isinstance(vocabulary, TokenizerFile)
    tokens = token_table(vocabulary.document["model"]["vocab"], ()).tokens
    trained = [token for token in tokens if len(token) > 1]
    return {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *trained])}


@cache
def tiktoken_file() -> Kind:
    """As Kimi's."""
    from shared.text.pre_tokenizers import KIMI

    encoding = library("tiktoken").Encoding(
        "tiny", pat_str=KIMI, mergeable_ranks=ranks(), special_tokens={}
    )
    added: list[dict[str, Any]] = []
    document = tiktoken_json(ranks(), KIMI, added)
    _add(document, len(ranks()))
    vocabulary = TokenizerFile(document, len(ranks()) + 4, *_ends(len(ranks())), add_bos=False)
    return Kind("tiktoken_file", vocabulary, encoding.encode_ordinary)


@cache
def byte_level_gguf() -> Kind:
    """As SmolLM2's in GGUF."""
    file = byte_level_file().vocabulary
    assert isinstance(file, TokenizerFile)
    model = file.document["model"]
    tokens = (*SPECIAL, WORD, *model["vocab"])
    vocabulary = Vocabulary(
        model="gpt2",
        pre="smollm",
        tokens=tokens,
        token_types=(*(TokenType.CONTROL,) * len(SPECIAL), TokenType.USER_DEFINED)
        + (TokenType.NORMAL,) * len(model["vocab"]),
        merges=tuple(" ".join(merge) for merge in model["merges"]),
        bos_token_id=0,
        eos_token_id=1,
        add_bos=False,
    )
    original = tokenizers.Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, right in model["merges"]],
        )
    )
    original.pre_tokenizer = pre_tokenizers.Sequence(  # HuggingFaceTB/SmolLM2-135M-Instruct
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return Kind("byte_level_gguf", vocabulary, lambda s: original.encode(s).ids)


@cache
def sentencepiece_gguf() -> Kind:
    """SentencePiece's byte pairs in GGUF, as Llama 2's and Mistral's."""
    return _sentencepiece_kind("sentencepiece_gguf", [WORD], prefix=True)


@cache
def gemma_gguf() -> Kind:
    """As Gemma's: no space before a text, and runs of spaces and lines that are always tokens."""
    runs = [WORD, "\n\n", "\n\n\n", MARK * 2, MARK * 3, MARK * 4, "<b>"]
    return _sentencepiece_kind("gemma_gguf", runs, prefix=False)


def _sentencepiece_kind(name: str, user_defined: list[str], *, prefix: bool) -> Kind:
    sentencepiece = library("sentencepiece")
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line.strip() for line in CORPUS * 4]),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        character_coverage=0.98,
        allow_whitespace_only_pieces=True,
        split_by_whitespace=False,
        control_symbols=["<|turn|>"],
        user_defined_symbols=user_defined,
        minloglevel=2,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    number = pieces.vocab_size()
    types = {
        TokenType.UNKNOWN: pieces.is_unknown,
        TokenType.CONTROL: pieces.is_control,
        TokenType.BYTE: pieces.is_byte,
        TokenType.USER_DEFINED: lambda i: pieces.id_to_piece(i) in user_defined,
    }
    vocabulary = Vocabulary(
        model="llama",
        pre="default",
        tokens=tuple(pieces.id_to_piece(i) for i in range(number)),
        token_types=tuple(
            next((kind for kind, holds in types.items() if holds(i)), TokenType.NORMAL)
            for i in range(number)
        ),
        merges=(),
        bos_token_id=1,
        eos_token_id=2,
        add_bos=True,
        scores=tuple(pieces.get_score(i) for i in range(number)),
        add_space_prefix=prefix,
    )
    return Kind(name, vocabulary, pieces.encode)


KINDS: dict[str, Callable[[], Kind]] = {
    "byte_level_file": byte_level_file,
    "byte_fallback_file": byte_fallback_file,
    "metaspace_file": metaspace_file,
    "unigram_file": unigram_file,
    "tiktoken_file": tiktoken_file,
    "byte_level_gguf": byte_level_gguf,
    "sentencepiece_gguf": sentencepiece_gguf,
    "gemma_gguf": gemma_gguf,
}


def _file_kind(
    name: str, document: dict[str, Any], decoded: Callable[[str], str | None] = lambda text: text
) -> Kind:
    last = max(token["id"] for token in document["added_tokens"])
    vocabulary = TokenizerFile(document, last + 8, *_ends_of(document), add_bos=True)
    original = tokenizers.Tokenizer.from_str(json.dumps(document))
    return Kind(
        name, vocabulary, lambda s: original.encode(s, add_special_tokens=False).ids, decoded
    )


def _space_mark_document(model: Any, trainer: Any) -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    _train(tokenizer, trainer)
    document: dict[str, Any] = json.loads(tokenizer.to_str())
    model = document["model"]
    head = ["<unk>", *SPECIAL, *BYTE_PIECES]
    if model["type"] == "BPE":
        names = [*head, *(token for token in model["vocab"] if token not in head)]
        model["vocab"] = {token: i for i, token in enumerate(names)}
        model |= {"unk_token": "<unk>", "fuse_unk": True}
    else:
        known = [piece for piece in model["vocab"] if piece[0] not in head]
        low = min(score for _, score in known) - 10
        # A control token's score of 0 is the best there is, as published files have it.
        scores = [(name, 0.0 if name in SPECIAL else low) for name in head]
        model |= {"vocab": [*scores, *known], "unk_id": 0}
    model["byte_fallback"] = True
    document["decoder"] = _sequence(
        "decoders",
        {"type": "Replace", "pattern": {"String": MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    )
    document["added_tokens"] = [
        _added(i, name, special=True) for i, name in enumerate(head[: len(SPECIAL) + 1])
    ]
    document["added_tokens"].append(_added(len(model["vocab"]), WORD, special=False))
    return document


def _train(tokenizer: tokenizers.Tokenizer, trainer: Any, **options: Any) -> None:
    tokenizer.train_from_iterator(
        CORPUS, trainer(vocab_size=600, show_progress=False, special_tokens=[], **options)
    )


def _add(document: dict[str, Any], first: int) -> None:
    for i, name in enumerate(SPECIAL):
        document["added_tokens"].append(_added(first + i, name, special=True))
    document["added_tokens"].append(_added(first + len(SPECIAL), WORD, special=False))


def _added(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": special}


def _ends(first: int) -> tuple[int, int]:
    return first, first + 1


def _ends_of(document: dict[str, Any]) -> tuple[int, int]:
    ids = {token["content"]: token["id"] for token in document["added_tokens"]}
    return ids["<s>"], ids["</s>"]


def _metaspace(scheme: str) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": MARK, "prepend_scheme": scheme, "split": False}


def _sequence(name: str, *rules: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: list(rules)}


def _unless_space_first(text: str) -> str | None:
    return None if text.startswith(" ") else text  # a space there is one that encoding puts
