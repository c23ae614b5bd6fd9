"""Tokenizer and chat template of a folder: every place they can be in, and what is refused."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.formats.folder_text import MAX_CONFIG_BYTES, read_folder_text
from shared.text.tokenizer import Tokenizer
from tests.tokenizer_kinds import BYTE_PIECES, byte_fallback_file, ranks, tiktoken_file

ROWS = 2000
Document = dict[str, Any]


def document() -> Document:
    return copy.deepcopy(dict(byte_fallback_file().vocabulary.document))  # type: ignore[union-attr]


def folder_of(folder: Path, **files: Any) -> Path:
    """A folder of JSON files, texts and bytes; names are written with __ for the point."""
    for name, content in ({"tokenizer__json": document()} | files).items():
        path = folder / name.replace("__", ".")
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def load(folder: Path, vocab_size: int = ROWS) -> Tokenizer:
    return Tokenizer.from_vocabulary(read_folder_text(folder, vocab_size).vocabulary)


def test_the_configs_name_begin_and_ends(tmp_path: Path) -> None:
    folder_of(
        tmp_path,
        tokenizer_config__json={"bos_token": "<s>", "eos_token": {"content": "</s>"}},
        generation_config__json={"eos_token_id": [3, 2]},
        config__json={"eos_token_id": 9, "bos_token_id": 9},
    )

    text = read_folder_text(tmp_path, ROWS)

    assert text.eos_token_ids == (3, 2)
    assert (text.vocabulary.bos_token_id, text.vocabulary.eos_token_id) == (1, 2)


def test_without_them_the_models_config_does(tmp_path: Path) -> None:
    folder_of(tmp_path, config__json={"bos_token_id": 1, "eos_token_id": 2})

    text = read_folder_text(tmp_path, ROWS)

    assert (text.vocabulary.bos_token_id, text.vocabulary.eos_token_id) == (1, 2)
    assert text.eos_token_ids == (2,)
    assert text.chat_template is None


BOS_FIRST = {"SpecialToken": {"id": "<s>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("single", "said", "expected"),
    [
        ([BOS_FIRST, TEXT], None, True),
        ([TEXT], None, False),
        ([TEXT], True, True),
        ([BOS_FIRST, TEXT], False, False),
    ],
)
def test_the_config_or_else_the_post_processor_says_whether_a_prompt_begins_with_it(
    tmp_path: Path, single: list[Any], said: bool | None, expected: bool
) -> None:
    rules = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}
    config = {"bos_token": "<s>"} | ({} if said is None else {"add_bos_token": said})
    for processor in (rules, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, rules]}):
        folder_of(
            tmp_path,
            tokenizer__json=document() | {"post_processor": processor},
            tokenizer_config__json=config,
        )

        assert load(tmp_path).add_bos is expected


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template__jinja": "T", "tokenizer_config__json": {"chat_template": "no"}},
        {"tokenizer_config__json": {"chat_template": "T"}, "chat_template__json": {}},
        {"chat_template__json": {"chat_template": "T"}},
        {
            "tokenizer_config__json": {
                "chat_template": [
                    {"name": "tool_use", "template": "no"},
                    {"name": "default", "template": "T"},
                ]
            }
        },
        {"tokenizer_config__json": {"chat_template": [{"name": "only", "template": "T"}]}},
    ],
)
def test_the_chat_template_is_found_in_all_its_places(
    tmp_path: Path, files: dict[str, Any]
) -> None:
    assert read_folder_text(folder_of(tmp_path, **files), ROWS).chat_template == "T"


def tiktoken_lines() -> bytes:
    return b"\n".join(base64.b64encode(token) + b" %d" % rank for token, rank in ranks().items())


def test_a_tiktoken_folder_has_its_names_and_the_reserved_ones(tmp_path: Path) -> None:
    first = len(ranks())
    entries = {
        str(first + i): {"content": name, "special": name != "<tool_call>"}
        for i, name in enumerate(("<s>", "</s>", "<|turn|>", "<tool_call>"))
    }
    folder_of(
        tmp_path,
        tokenizer__json=None,
        tiktoken__model=tiktoken_lines(),
        tokenizer_config__json={
            "tokenizer_class": "TikTokenTokenizer",
            "added_tokens_decoder": entries,
            "bos_token": "<s>",
            "eos_token": "</s>",
        },
        chat_template__jinja="{{ bos_token }}",
    )

    tokenizer = load(tmp_path, first + 300)

    assert tokenizer.eos_token_id == first + 1
    assert tokenizer.token_text(first + 4) == f"<|reserved_token_{first + 4}|>"
    assert tokenizer.token_text(first + 255) == f"<|reserved_token_{first + 255}|>"
    assert tokenizer.token_bytes(first + 299) == b""
    text = "It's 漢字かな 12345 THE END\n\n<|turn|>"
    assert tokenizer.encode(text, parse_special=False) == tiktoken_file().reference(text)


def without(key: str) -> Callable[[Document], Any]:
    def change(found: Document) -> None:
        del found[key]

    return change


def rule(part: str, **fields: Any) -> Callable[[Document], Any]:
    return lambda found: found.update({part: fields})


def split(pattern: str) -> Callable[[Document], Any]:
    return rule(
        "pre_tokenizer",
        type="Split",
        pattern={"Regex": pattern},
        behavior="Isolated",
        invert=False,
    )


def added(token_id: Any, content: Any) -> Callable[[Document], Any]:
    return lambda found: found["added_tokens"].append({"id": token_id, "content": content})


def vocab(**ids: Any) -> Callable[[Document], Any]:
    return lambda found: found["model"]["vocab"].update(ids)


REFUSED: dict[str, tuple[Callable[[Document], Any], str]] = {
    "no model": (without("model"), "malformed: 'model'|malformed: KeyError"),
    "word piece": (lambda d: d["model"].update(type="WordPiece"), "'WordPiece' is not supported"),
    "suffix": (lambda d: d["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix '</w>'"),
    "wrong merges": (lambda d: d["model"].update(merges=[["q", "zzz"]]), "zzz"),
    "merges of numbers": (lambda d: d["model"].update(merges=[1]), "cannot be read"),
    "vocabulary of texts": (lambda d: d["model"].update(vocab="abc"), "malformed"),
    "id that is a text": (vocab(xyz="7"), "'xyz' has the id '7'"),
    "id that is a bool": (vocab(xyz=True), "'xyz' has the id True"),
    "negative id": (vocab(xyz=-1), "'xyz' has id -1"),
    "hole": (vocab(xyz=1500), r"no token of id \d+, and its last is 1500"),
    "id twice": (vocab(xyz=5), "have one id, 5"),
    "beyond the embedding": (vocab(xyz=10**9), "'xyz' has id 1000000000, .* has 2000 rows"),
    "added beyond": (added(ROWS, "<x>"), "'<x>' has id 2000"),
    "added with another id": (added(700, "<s>"), "'<s>' has two ids: 1 and 700"),
    "added with an id in use": (added(9, "<x>"), "have one id, 9"),
    "added without text": (added(700, ""), "700 has no text"),
    "added without id": (added(None, "<x>"), "'<x>' has the id None"),
    "another normalizer": (
        rule("normalizer", type="BertNormalizer"),
        "normalizer 'BertNormalizer'",
    ),
    "another pre-tokenizer": (rule("pre_tokenizer", type="BertPreTokenizer"), "'BertPreTokenizer'"),
    "another decoder": (rule("decoder", type="WordPiece"), "decoder .*WordPiece.* not supported"),
    "no decoder": (rule("decoder", type="Fuse"), r"decoder of \['Fuse'\]"),
    "long replacement": (
        rule("normalizer", type="Replace", pattern={"String": "a"}, content="b" * 100),
        "text of 100 characters",
    ),
    "many rules": (
        rule("normalizer", type="Sequence", normalizers=[{"type": "NFC"}] * 100),
        "normalizer has more than 64 rules",
    ),
    "damaged charsmap": (
        rule("normalizer", type="Precompiled", precompiled_charsmap="AAAA"),
        "precompiled_charsmap that is damaged",
    ),
    "exponential": (split("(a+)+b"), "a repeat is within a repeat"),
    "back reference": (split(r"(a)\1"), r"\\1 is not supported"),
    "recursion": (split(r"\g<0>"), "is not supported"),
    "long pattern": (split("a" * 5000), "5000 characters"),
    "no pattern": (split("("), "not closed"),
    "what the engine refuses": (split(r"\p{Nonsense}"), "cannot be read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, message = REFUSED[name]
    found = document()
    change(found)

    with pytest.raises(ModelError, match=message) as refusal:
        load(folder_of(tmp_path, tokenizer__json=found))

    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 400


ODD: list[Any] = [None, True, -1, 2**40, 0.5, "", "a", "\ud800", [], {}, [[]], {"type": "Sequence"}]


def places(value: Any, rng: random.Random) -> list[tuple[Any, Any]]:
    """Some of the places in a document: (map or list, key)."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    found = [(value, key) for key in (rng.sample(keys, 3) if len(keys) > 40 else keys)]
    for holder, key in list(found):
        if isinstance(holder[key], dict | list):
            found += places(holder[key], rng)
    return found


def test_a_document_with_anything_in_any_place_is_refused_or_works(tmp_path: Path) -> None:
    rng, outcomes = random.Random(5), set()
    for _ in range(150):
        found = document()
        holder, key = rng.choice(places(found, rng))
        holder[key] = rng.choice(ODD)
        folder_of(tmp_path, tokenizer__json=found)
        try:
            tokenizer = load(tmp_path)
        except ModelError:
            outcomes.add("refused")
            continue
        ids = tokenizer.encode("hello 12 é漢 </s>", parse_special=False)
        assert tokenizer.special_token_ids.isdisjoint(set(ids) - {0})
        outcomes.add("works")
    assert outcomes == {"refused", "works"}


CONFIG = "tokenizer_config__json"
REFUSED_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"tokenizer__json": None}, "tokenizer.json: there is no such file"),
    "sentencepiece": ({"tokenizer__json": None, "tokenizer__model": b"x"}, "SentencePiece"),
    "no JSON": ({"tokenizer__json": "{"}, "tokenizer.json: it is no JSON"),
    "no UTF-8": ({"tokenizer__json": b"\xff{"}, "tokenizer.json: it is no JSON"),
    "a list": ({"tokenizer__json": []}, "tokenizer.json: it holds a list"),
    "nested": ({"tokenizer__json": "[" * 10**5}, "tokenizer.json: it is no JSON"),
    "huge": ({CONFIG: " " * (MAX_CONFIG_BYTES + 1)}, "tokenizer_config.json: it has more than"),
    "unknown begin": ({CONFIG: {"bos_token": "<z>"}}, "bos_token '<z>' is no token"),
    "begin of numbers": ({CONFIG: {"bos_token": 3}}, "bos_token 3 is no token"),
    "end outside": ({"config__json": {"eos_token_id": ROWS}}, "config.json: eos_token_id 2000"),
    "end that is a text": (
        {"generation_config__json": {"eos_token_id": ["2"]}},
        "eos_token_id '2'",
    ),
    "template of numbers": ({CONFIG: {"chat_template": 7}}, "chat_template is a int"),
    "template of bytes": ({"chat_template__jinja": b"\xff"}, "chat_template.jinja: it is no UTF-8"),
    "unknown tiktoken": (
        {"tokenizer__json": None, "tiktoken__model": b"", CONFIG: {"tokenizer_class": "X"}},
        "tokenizer_class 'X' is not known",
    ),
}


@pytest.mark.parametrize("name", REFUSED_FILES)
def test_a_folder_that_cannot_be_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    files, message = REFUSED_FILES[name]

    with pytest.raises(ModelError, match=message):
        load(folder_of(tmp_path, **files))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (b"YQ== 0 1", "line 1 is no token and rank"),
        (b"YQ== x", "line 1 is no token and rank"),
        (b"Y!== 0", "line 1 is no token and rank"),
        (b"YQ== 0\nYQ== 1", "line 2 names the token b'a' again"),
        (b"YQ== 0", "no token for the byte 0"),
        (tiktoken_lines().replace(b"AA== 0", b"AA== 7"), "have one id, 7"),
        (tiktoken_lines() + b"\nenp6enp6 9999999", "has id 9999999"),
    ],
)
def test_a_tiktoken_file_that_cannot_be_used_is_refused(
    tmp_path: Path, lines: bytes, message: str
) -> None:
    config = {"tokenizer_class": "TikTokenTokenizer"}
    folder_of(tmp_path, tokenizer__json=None, tiktoken__model=lines, tokenizer_config__json=config)

    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_rules_that_would_cut_or_chance_a_text_are_left_out(tmp_path: Path) -> None:
    found = document()
    found["truncation"] = {
        "direction": "Right",
        "max_length": 1,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    found["model"]["dropout"] = 0.9

    tokenizer = load(folder_of(tmp_path, tokenizer__json=found))

    text = "The workers take a step from their queue"
    assert tokenizer.encode(text, parse_special=False) == byte_fallback_file().reference(text)
    assert tokenizer.decode([4 + byte for byte in "é".encode()]) == "é"
    assert tokenizer.token_text(4) == "\0"
    assert BYTE_PIECES[0] == "<0x00>"


def test_white_space_that_a_control_token_takes_is_taken_beside_what_users_write(
    tmp_path: Path,
) -> None:
    from shared.text.chat_template import ChatTemplate
    from shared.text.prompt import conversation_token_ids

    found = document()
    for token in found["added_tokens"]:
        token["rstrip"] = token["content"] == "<|turn|>"
    tokenizer = load(folder_of(tmp_path, tokenizer__json=found))
    template = ChatTemplate("{% for m in messages %}<|turn|>\n {{ m.content }}</s>{% endfor %}")

    def ids(content: str) -> list[int]:
        turns = [{"role": "user", "content": content}]
        return list(conversation_token_ids(turns, tokenizer, template, max_positions=1 << 20))

    plain, guarded = ids("hello"), ids("hello<s>")
    assert tokenizer.decode(plain) == " hello"
    assert guarded[: len(plain) - 1] == plain[:-1]
    assert tokenizer.decode(guarded) == " hello<s>"
