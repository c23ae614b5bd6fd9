"""A GGUF file's vocabulary as a `tokenizer.json` document. Pure.

It is written here, not by the library, so that its bytes (and with them the model's digest) do not
change with the library's version. Format: https://github.com/huggingface/tokenizers (models/bpe,
`Tokenizer.from_str`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shared.errors import ModelError
from shared.text.pre_tokenizers import PRE_TOKENIZERS
from shared.text.token_bytes import SPACE_MARK, Spelling
from shared.text.vocabulary import TokenType, Vocabulary

DAMAGED_REMEDY = "the model file is damaged or its converter failed; fetch another"
MODELS = ("gpt2", "llama")
_SPECIAL_TYPES = (TokenType.CONTROL, TokenType.UNKNOWN)
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_SMOLLM = {  # as packed models of all versions have it
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
}


def vocabulary_json(vocabulary: Vocabulary) -> tuple[dict[str, Any], Spelling]:
    """The document, and how its tokens are spelled.

    Raises `ModelError` for a tokenizer model or pre-tokenizer that is not supported, and for
    tokens, merges and scores that do not fit each other.
    """
    if vocabulary.model == "llama":
        vocabulary = replace(vocabulary, tokens=_with_plain_spaces(vocabulary))
    vocab = {token: i for i, token in enumerate(vocabulary.tokens)}
    if len(vocab) != len(vocabulary.tokens):
        raise ModelError(
            f"the vocabulary names {len(vocabulary.tokens) - len(vocab)} tokens twice",
            remedy=DAMAGED_REMEDY,
        )
    match vocabulary.model:
        case "gpt2":
            return _byte_level(vocabulary, vocab), Spelling.BYTE_LEVEL
        case "llama":
            return _space_marks(vocabulary, vocab), Spelling.SPACE_MARKS_AND_BYTES
        case model:
            raise ModelError(
                f"tokenizer model {model!r:.40} is not supported; supported: {', '.join(MODELS)}",
                remedy="give a model whose tokenizer is supported",
            )


def default_add_bos(model: str, pre: str) -> bool:
    """Whether a raw prompt starts with the begin token in a model file that does not say."""
    return model == "llama" or (pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].add_bos)


def bpe_model(vocab: dict[str, int], merges: list[list[str]], **changes: Any) -> dict[str, Any]:
    """The model part of a `tokenizer.json` with byte-pair encoding."""
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        **changes,
        "vocab": vocab,
        "merges": merges,
    }


def document_json(
    model: dict[str, Any],
    added_tokens: list[dict[str, Any]],
    *,
    normalizer: dict[str, Any] | None = None,
    pre_tokenizer: dict[str, Any] | None = None,
    decoder: dict[str, Any] = _BYTE_LEVEL,
) -> dict[str, Any]:
    """A `tokenizer.json` of these parts; the decoder is byte-level unless given."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }


def added_token(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens`, found in texts as it stands there."""
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def _byte_level(vocabulary: Vocabulary, vocab: dict[str, int]) -> dict[str, Any]:
    merges = [_merge(text) for text in vocabulary.merges]
    if vocabulary.pre == "smollm":
        return document_json(bpe_model(vocab, merges), _added(vocabulary), pre_tokenizer=_SMOLLM)
    kind = PRE_TOKENIZERS.get(vocabulary.pre)
    if kind is None:
        raise ModelError(
            f"pre-tokenizer {vocabulary.pre!r:.40} is not supported; "
            f"supported: {', '.join(sorted(('smollm', *PRE_TOKENIZERS)))}",
            remedy="give a model whose tokenizer is supported",
        )
    return document_json(
        bpe_model(vocab, merges, ignore_merges=kind.ignore_merges),
        _added(vocabulary),
        normalizer=kind.normalizer,
        pre_tokenizer=kind.rules(),
    )


def _space_marks(vocabulary: Vocabulary, vocab: dict[str, int]) -> dict[str, Any]:
    """SentencePiece's byte-pair encoding: whole texts, with marks for spaces."""
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise ModelError(
            f"the vocabulary has {len(vocabulary.scores)} scores for "
            f"{len(vocabulary.tokens)} tokens",
            remedy=DAMAGED_REMEDY,
        )
    unknown = next(
        (
            token
            for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True)
            if kind == TokenType.UNKNOWN
        ),
        None,
    )
    replace_spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers: list[dict[str, Any]] = [replace_spaces]
    if vocabulary.add_space_prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": SPACE_MARK})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return document_json(
        bpe_model(
            vocab,
            _merges_of_scores(vocabulary, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        ),
        _added(vocabulary),
        normalizer={"type": "Sequence", "normalizers": normalizers},
        decoder={"type": "Sequence", "decoders": decoders},
    )


def _with_plain_spaces(vocabulary: Vocabulary) -> tuple[str, ...]:
    """The tokens, with spaces in those that are looked for in a text before it gets its marks."""
    return tuple(
        token.replace(SPACE_MARK, " ") if kind == TokenType.USER_DEFINED else token
        for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True)
    )


def _merges_of_scores(vocabulary: Vocabulary, vocab: dict[str, int]) -> list[list[str]]:
    """Every pair that makes a token, in the order in which SentencePiece would merge them.

    It takes the pair whose token has the highest score, and of several the leftmost. Scores are
    equal where it counts for runs of spaces (-1e9 each, in Llama's and Mistral's): there the pair
    with the longest left part first gives what the leftmost gives.
    """
    merges: list[tuple[float, int, int, int, str, str]] = []
    for token, kind, score in zip(
        vocabulary.tokens, vocabulary.token_types, vocabulary.scores, strict=True
    ):
        if kind not in (TokenType.NORMAL, TokenType.UNUSED):
            continue
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocab and right in vocab:
                merges.append((-score, -at, -len(right), vocab[left], left, right))
    merges.sort()
    return [[left, right] for *_, left, right in merges]


def _added(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    added: list[dict[str, Any]] = []
    for i, kind in enumerate(vocabulary.token_types):
        if kind in (*_SPECIAL_TYPES, TokenType.USER_DEFINED):
            added.append(added_token(i, vocabulary.tokens[i], special=kind in _SPECIAL_TYPES))
    return added


def _merge(text: str) -> list[str]:
    left, space, right = text.partition(" ")
    if not (left and space and right) or " " in right:
        raise ModelError(f"tokenizer merge {text!r:.60} is no pair", remedy=DAMAGED_REMEDY)
    return [left, right]
