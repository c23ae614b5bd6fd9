"""What of a foreign `tokenizer.json` is run, and how its tokens are spelled. Pure.

The document keeps its vocabulary and its rules; what would cut, pad or chance a text is left out.
Format: https://huggingface.co/docs/tokenizers/api/models and its pages beside.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any

from shared.errors import ModelError
from shared.text.patterns import check_pattern
from shared.text.token_bytes import SPACE_MARK, Spelling

MODELS = ("BPE", "Unigram")
MAX_TEXT_CHARS = 64  # of what a rule puts into texts, or looks for
MAX_RULES = 64

_NORMALIZERS = (
    "Sequence, NFC, NFD, NFKC, NFKD, Nmt, Lowercase, Strip, StripAccents, Replace, Prepend, "
    "Precompiled"
)
_PRE_TOKENIZERS = (
    "Sequence, ByteLevel, Split, Digits, Metaspace, Punctuation, WhitespaceSplit, UnicodeScripts"
)
_PARTS = ("normalizers", "pretokenizers", "decoders")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def checked_document(document: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The document as it travels. `vocab_size` are the rows of the embedding.

    Raises `ModelError` that names what is not supported or does not fit.
    """
    try:
        model, added = _model(document["model"]), _added_tokens(document.get("added_tokens") or [])
        _check_ids(model["vocab"], added, vocab_size)
        for part, known in (("normalizer", _NORMALIZERS), ("pre_tokenizer", _PRE_TOKENIZERS)):
            for rule in _rules(document.get(part), part):
                _check_rule(rule, part, known)
        spelling_of(document)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise _bad(f"it is malformed: {type(error).__name__} {error!s:.100}") from error
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "model": model,  # its vocabulary stands before whatever else might be named so
        "normalizer": document.get("normalizer"),
        "pre_tokenizer": document.get("pre_tokenizer"),
        "post_processor": None,
        "decoder": document["decoder"],
    }


def spelling_of(document: Mapping[str, Any]) -> Spelling:
    """How the tokens are spelled, as the decoder has it. Raises `ModelError` for other decoders."""
    rules = list(_rules(document.get("decoder"), "decoder"))
    kinds = [rule["type"] for rule in rules]
    if kinds and set(kinds) == {"ByteLevel"}:
        return Spelling.BYTE_LEVEL
    for rule in rules:
        if not _undoes_space_marks(rule):
            raise _bad(f"its decoder {_shown(rule)} is not supported")
    if not {"Replace", "Metaspace"} & set(kinds):
        raise _bad(f"a decoder of {kinds} is not supported")
    is_bytes = "ByteFallback" in kinds
    return Spelling.SPACE_MARKS_AND_BYTES if is_bytes else Spelling.SPACE_MARKS


def strips_first_space(document: Mapping[str, Any]) -> bool:
    """Whether decoding a whole text leaves out a space that encoding put before it."""
    return any(
        (rule["type"] == "Strip" and rule["start"] == 1)
        or (rule["type"] == "Metaspace" and _prepend_scheme(rule) != "never")
        for rule in _rules(document.get("decoder"), "decoder")
    )


def continued(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """The document for texts that are not the first of a prompt; None if that is no difference.

    A Metaspace of scheme "first" puts a space before the first piece alone.
    """
    rules = list(_rules(document.get("pre_tokenizer"), "pre_tokenizer"))
    if not any(_is_first_only(rule) for rule in rules):
        return None
    never = [{**r, "prepend_scheme": "never"} if _is_first_only(r) else r for r in rules]
    return {**document, "pre_tokenizer": {"type": "Sequence", "pretokenizers": never}}


def without_control(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with a model that does not know the control tokens of its vocabulary.

    Their names become what no text is, for a space is always written in another way; the others
    keep their ids.
    """
    model, added = document["model"], document["added_tokens"]
    vocab = model["vocab"]
    known = vocab if isinstance(vocab, Mapping) else {piece[0] for piece in vocab}
    names = {t["content"] for t in added if t["special"] and t["content"] in known}
    if isinstance(vocab, Mapping):
        renamed = {f" {i}" if token in names else token: i for token, i in vocab.items()}
        merges = [m for m in model["merges"] if names.isdisjoint(_tokens_of(m))]
        model = {**model, "vocab": renamed, "merges": merges}
    else:
        pieces = [(f" {i}" if p[0] in names else p[0], p[1]) for i, p in enumerate(vocab)]
        model = {**model, "vocab": pieces}
    if model.get("unk_token") in names:
        model["unk_token"] = f" {vocab[model['unk_token']]}"
    others = [token for token in added if token["content"] not in names]
    return {**document, "model": model, "added_tokens": others}


def _tokens_of(merge: Any) -> tuple[str, str, str]:
    # Older files have them as one text.
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right


def _is_first_only(rule: Mapping[str, Any]) -> bool:
    return rule["type"] == "Metaspace" and _prepend_scheme(rule) == "first"


def _prepend_scheme(rule: Mapping[str, Any]) -> str:
    # Older files have a switch in its place.
    older = "always" if rule.get("add_prefix_space", True) else "never"
    return str(rule.get("prepend_scheme") or older)


def _model(model: Mapping[str, Any]) -> dict[str, Any]:
    kind = model.get("type") or ("BPE" if "merges" in model else "Unigram")
    if kind not in MODELS:
        raise _bad(f"its model {kind!r:.40} is not supported; supported: {', '.join(MODELS)}")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(affix):
            raise _bad(f"its {affix} {model[affix]!r:.40} is not supported")
    rest = {key: value for key, value in model.items() if key not in ("type", "vocab", "dropout")}
    return {"type": kind, "vocab": model["vocab"], **rest}


def _added_tokens(tokens: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = [
        {"id": token["id"], "content": token["content"]}
        | {flag: bool(token.get(flag, flag == "normalized")) for flag in _FLAGS}
        for token in tokens
    ]
    for token in found:
        if type(token["id"]) is not int or not isinstance(token["content"], str):
            raise _bad(f"its added token {token['content']!r:.60} has the id {token['id']!r:.40}")
        if not token["content"]:
            raise _bad(f"its added token {token['id']} has no text")
    return sorted(found, key=lambda token: token["id"])  # the library numbers them in order


def _check_ids(vocab: Any, added: list[dict[str, Any]], vocab_size: int) -> None:
    """Refuse ids that are no numbers, too large, used twice, or left out."""
    if isinstance(vocab, Mapping):
        ids = dict(vocab)
    else:
        ids = {piece: i for i, (piece, _) in enumerate(vocab)}
        if len(ids) != len(vocab):
            raise _bad(f"its vocabulary names {len(vocab) - len(ids)} tokens twice")
    for token, token_id in ids.items():
        if type(token_id) is not int or not isinstance(token, str):
            raise _bad(f"its token {token!r:.60} has the id {token_id!r:.40}")
    for entry in added:
        known = ids.setdefault(entry["content"], entry["id"])
        if known != entry["id"]:
            raise _bad(f"its token {entry['content']!r:.60} has two ids: {known} and {entry['id']}")
    if not ids:
        raise _bad("it has no tokens")
    by_id = dict(zip(ids.values(), ids, strict=True))
    last = max(by_id)
    if last >= vocab_size or min(by_id) < 0:
        wrong = last if last >= vocab_size else min(by_id)
        raise _bad(
            f"its token {by_id[wrong]!r:.60} has id {wrong}, and the model's embedding has "
            f"{vocab_size} rows"
        )
    if len(by_id) != len(ids):
        token, token_id = next((t, i) for t, i in ids.items() if by_id[i] != t)
        raise _bad(f"its tokens {token!r:.60} and {by_id[token_id]!r:.60} have one id, {token_id}")
    if len(by_id) != last + 1:
        hole = next(i for i in range(last) if i not in by_id)
        raise _bad(f"it has no token of id {hole}, and its last is {last}")


def _rules(rule: Any, part: str) -> Iterator[Mapping[str, Any]]:
    """The rules of a part, sequences taken apart."""
    found = list(_flattened(rule, 0))
    if len(found) > MAX_RULES:
        raise _bad(f"its {part} has more than {MAX_RULES} rules")
    yield from found


def _flattened(rule: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    if rule is None:
        return
    if rule["type"] != "Sequence":
        yield rule
        return
    if depth > MAX_RULES:
        raise _bad("its rules are nested too deep")
    parts = [part for name in _PARTS for part in rule.get(name, ())]
    for part in parts[: MAX_RULES + 1]:
        yield from _flattened(part, depth + 1)


def _check_rule(rule: Mapping[str, Any], part: str, known: str) -> None:
    if rule["type"] not in known.split(", "):
        raise _bad(f"its {part} {rule['type']!r:.40} is not supported; supported: {known}")
    pattern = rule.get("pattern") or {}
    for text in (rule.get("content"), rule.get("prepend"), pattern.get("String")):
        if text is not None and len(text) > MAX_TEXT_CHARS:
            raise _bad(f"its {part} has a text of {len(text)} characters (limit {MAX_TEXT_CHARS})")
    if rule["type"] == "Precompiled" and not _is_charsmap(rule["precompiled_charsmap"]):
        raise _bad(f"its {part} has a precompiled_charsmap that is damaged")
    if "Regex" in pattern:
        try:
            check_pattern(pattern["Regex"])
        except ValueError as error:
            raise _bad(f"its pattern {pattern['Regex']!r:.80} is not run: {error}") from error


def _is_charsmap(text: str) -> bool:
    """Whether a SentencePiece normaliser is one: bytes of a trie, the trie, texts. The library
    ends in a panic for others."""
    try:
        raw = base64.b64decode(text, validate=True)
        size = int.from_bytes(raw[:4], "little")
        raw[4 + size :].decode()
    except ValueError:
        return False
    return size > 0 and size % 4 == 0 and size + 4 < len(raw)


def _undoes_space_marks(rule: Mapping[str, Any]) -> bool:
    match rule["type"]:
        case "Replace":
            return bool(rule["pattern"] == {"String": SPACE_MARK} and rule["content"] == " ")
        case "Strip":
            return rule["content"] == " " and rule["start"] in (0, 1) and rule["stop"] == 0
        case "Metaspace":
            return bool(rule["replacement"] == SPACE_MARK)
        case kind:
            return kind in ("ByteFallback", "Fuse")


def _shown(rule: Mapping[str, Any]) -> str:
    return f"{dict(rule)!r:.100}"


def _bad(what: str) -> ModelError:
    return ModelError(
        f"the tokenizer cannot be used: {what}",
        remedy="give the tokenizer.json that belongs to the model",
    )
