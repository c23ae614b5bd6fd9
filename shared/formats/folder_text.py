"""Tokenizer and chat template of a Hugging Face folder. Knows no tensors and no tokenizer library.

Which files say what: https://huggingface.co/docs/transformers/main_classes/tokenizer and
https://huggingface.co/docs/transformers/chat_templating
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.errors import ModelError
from shared.text.tiktoken_json import PATTERNS, read_ranks, tiktoken_json
from shared.text.vocabulary import TokenizerFile
from shared.text.vocabulary_json import added_token

MAX_TOKENIZER_BYTES = 64 << 20  # Gemma 3's has 33 MB
MAX_CONFIG_BYTES = 4 << 20
NUM_RESERVED_TOKENS = 256  # after the ranks of a tiktoken file, named or not


@dataclass(frozen=True, slots=True)
class FolderText:
    """What a folder says of text. `eos_token_ids` end an answer, the tokenizer's own among them."""

    vocabulary: TokenizerFile
    chat_template: str | None
    eos_token_ids: tuple[int, ...]


def read_folder_text(folder: Path, vocab_size: int) -> FolderText:
    """Read the tokenizer of a model whose embedding has `vocab_size` rows.

    Raises `ModelError` naming the file, and what of it is missing, malformed or too large. Whether
    the tokenizer itself can be used says `Tokenizer.from_vocabulary`.
    """
    config = read_json(folder, "tokenizer_config.json") or {}
    document = _document(folder, config, vocab_size)
    ids = _ids_by_text(document)
    names = {**(read_json(folder, "special_tokens_map.json") or {}), **config}
    model_config = read_json(folder, "config.json") or {}
    generation = read_json(folder, "generation_config.json") or {}
    bos, eos = (_named_id(names, key, ids) for key in ("bos_token", "eos_token"))
    if bos is None and "bos_token" not in names:
        bos = next(_id_list(model_config, "config.json", "bos_token_id", vocab_size), None)
    ends = list(_id_list(generation, "generation_config.json", "eos_token_id", vocab_size)) or list(
        _id_list(model_config, "config.json", "eos_token_id", vocab_size)
    )
    ends = list(dict.fromkeys([*ends, *([] if eos is None else [eos])]))
    vocabulary = TokenizerFile(
        document=document,
        vocab_size=vocab_size,
        bos_token_id=bos,
        eos_token_id=eos if eos is not None else next(iter(ends), None),
        add_bos=bos is not None and _adds_bos(config, document, bos, ids),
    )
    return FolderText(vocabulary, _chat_template(folder, config), tuple(ends))


def _document(folder: Path, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    document = read_json(folder, "tokenizer.json", MAX_TOKENIZER_BYTES)
    if document is not None:
        return document
    raw = _read(folder, "tiktoken.model", MAX_TOKENIZER_BYTES)
    if raw is not None:
        return _tiktoken(raw, config, vocab_size)
    if (folder / "tokenizer.model").is_file():
        raise _bad(
            "tokenizer.model", "a SentencePiece model alone is not supported: tokenizer.json"
        )
    raise _bad("tokenizer.json", "there is no such file, nor tiktoken.model")


def _tiktoken(raw: bytes, config: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    kind = config.get("tokenizer_class")
    if kind not in PATTERNS:
        raise _bad(
            "tokenizer_config.json",
            f"tokenizer_class {kind!r:.60} is not known to split texts for a tiktoken.model; "
            f"known: {', '.join(PATTERNS)}",
        )
    ranks = read_ranks(raw)
    first = len(ranks)
    last = min(first + NUM_RESERVED_TOKENS, vocab_size)
    special = {
        i: added_token(i, f"<|reserved_token_{i}|>", special=True) for i in range(first, last)
    }
    entries = config.get("added_tokens_decoder") or {}
    try:
        for key, entry in entries.items():
            content, is_special = str(entry["content"]), bool(entry.get("special", True))
            special[int(key)] = added_token(int(key), content, special=is_special)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _bad(
            "tokenizer_config.json", f"added_tokens_decoder is malformed: {error!r:.100}"
        ) from error
    return tiktoken_json(ranks, PATTERNS[kind], list(special.values()))


def _ids_by_text(document: Mapping[str, Any]) -> dict[str, int]:
    try:
        vocab = document["model"]["vocab"]
        ids = (
            dict(vocab)
            if isinstance(vocab, Mapping)
            else {piece[0]: i for i, piece in enumerate(vocab)}
        )
        return ids | {t["content"]: t["id"] for t in document.get("added_tokens") or []}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise _bad("tokenizer.json", f"it is malformed: {error!r:.100}") from error


def _named_id(names: Mapping[str, Any], key: str, ids: Mapping[str, int]) -> int | None:
    """The id of the token that a config names; None where it names none."""
    name = names.get(key)
    if isinstance(name, Mapping):
        name = name.get("content")
    if name is None or name == "":
        return None
    token_id = ids.get(name) if isinstance(name, str) else None
    if type(token_id) is not int:
        raise _bad("tokenizer_config.json", f"{key} {name!r:.60} is no token of the tokenizer")
    return token_id


def _id_list(config: Mapping[str, Any], name: str, key: str, vocab_size: int) -> Iterator[int]:
    value = config.get(key)
    for token_id in value if isinstance(value, list) else [value]:
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise _bad(name, f"{key} {token_id!r:.40} is no id of 0..{vocab_size - 1}")
        yield token_id


def _adds_bos(
    config: Mapping[str, Any], document: Mapping[str, Any], bos: int, ids: Mapping[str, int]
) -> bool:
    said = config.get("add_bos_token")
    if isinstance(said, bool):
        return said
    return any(ids.get(name) == bos for name in _first_of_templates(document.get("post_processor")))


def _first_of_templates(rule: Any) -> Iterator[str]:
    """The token that each template of a post-processor puts first."""
    match rule:
        case {"type": "Sequence", "processors": list(parts)}:
            for part in parts[:16]:
                match part:
                    case {"type": "TemplateProcessing"}:
                        yield from _first_of_templates(part)
        case {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": str(name)}}, *_]}:
            yield name


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """As transformers: a file of its own goes before the tokenizer's config, an old one after."""
    raw = _read(folder, "chat_template.jinja", MAX_CONFIG_BYTES)
    if raw is not None:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise _bad("chat_template.jinja", "it is no UTF-8") from error
    old = read_json(folder, "chat_template.json") or {}
    for name, source in (
        ("tokenizer_config.json", config.get("chat_template")),
        ("chat_template.json", old.get("chat_template")),
    ):
        if source is not None:
            return _default_of(name, source)
    return None


def _default_of(name: str, source: Any) -> str:
    """A template, or the default one of several with names."""
    if isinstance(source, list):
        named = {
            entry["name"]: entry.get("template")
            for entry in source
            if isinstance(entry, Mapping) and isinstance(entry.get("name"), str)
        }
        source = named.get("default", next(iter(named.values()), None))
    if not isinstance(source, str):
        raise _bad(name, f"chat_template is a {type(source).__name__}, not a text or named texts")
    return source


def read_json(folder: Path, name: str, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
    """The object in a file of a folder; None if there is none.

    Raises `ModelError` for one that is too large or no JSON object.
    """
    raw = _read(folder, name, max_bytes)
    if raw is None:
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _bad(name, f"it is no JSON: {error!s:.100}") from error
    if not isinstance(found, dict):
        kind = "null" if found is None else f"a {type(found).__name__}"
        raise _bad(name, f"it holds {kind}, not an object")
    return found


def _read(folder: Path, name: str, max_bytes: int) -> bytes | None:
    path = folder / name
    if not path.exists():
        return None
    if not path.is_file():
        raise _bad(name, "it is no file")
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise _bad(name, f"it cannot be read: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise _bad(name, f"it has more than {max_bytes} bytes")
    return raw


def _bad(name: str, what: str) -> ModelError:
    return ModelError(f"{name}: {what}", remedy="give the whole folder of a model, as published")
