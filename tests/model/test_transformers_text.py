"""Tokenizer and chat template of a folder, as transformers has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.formats.folder_text import read_folder_text
from shared.text.chat_template import ChatTemplate
from shared.text.document import read_text_document, write_text_document
from shared.text.prompt import conversation_token_ids, text_token_ids
from shared.text.tokenizer import Tokenizer
from tests.tokenizer_kinds import KINDS, SPECIAL, texts

pytestmark = pytest.mark.oracle

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>{% endif %}"
)
BOS_FIRST = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
}


@pytest.mark.parametrize(
    "name", ["byte_level_file", "byte_fallback_file", "metaspace_file", "unigram_file"]
)
@pytest.mark.parametrize("begins", [True, False])
def test_ids_and_conversations_are_those_of_transformers(
    tmp_path: Path, name: str, begins: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    document: dict[str, Any] = dict(KINDS[name]().vocabulary.document)  # type: ignore[union-attr]
    if begins:
        ids = {token["content"]: token["id"] for token in document["added_tokens"]}
        begin = {"<s>": {"id": "<s>", "ids": [ids["<s>"]], "tokens": ["<s>"]}}
        document["post_processor"] = BOS_FIRST | {"special_tokens": begin}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)

    found = read_folder_text(tmp_path, 2000)
    ours, template = read_text_document(
        write_text_document(Tokenizer.from_vocabulary(found.vocabulary), found.chat_template)
    )

    assert template is not None
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in texts(number=300):
        if not any(name in text for name in SPECIAL):
            expected = theirs(text)["input_ids"]
            assert list(text_token_ids(text, ours, max_positions=1 << 20)) == expected
        _compare_conversation(ours, template, theirs, text)


def _compare_conversation(
    ours: Tokenizer, template: ChatTemplate, theirs: Any, content: str
) -> None:
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": f" {content}\n"},
        {"role": "user", "content": "again"},
    ]
    rendered = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert template.render_turns(turns) == rendered
    found = conversation_token_ids(turns, ours, template, max_positions=1 << 20)
    assert list(found) == theirs(rendered, add_special_tokens=False)["input_ids"]
