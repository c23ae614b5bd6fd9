"""SmolLM2's tokenizer and chat template against what Hugging Face and llama.cpp give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shared.formats.gguf import read_gguf
from shared.messages import ChatMessage
from shared.text.chat_template import ChatTemplate
from shared.text.document import read_text_document, write_text_document
from shared.text.tokenizer import Tokenizer

CASES = json.loads((Path(__file__).parents[1] / "golden" / "tokenize.json").read_text())

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def smollm2(real_model_path: Path) -> tuple[Tokenizer, ChatTemplate]:
    description = read_gguf(real_model_path)
    raw = write_text_document(
        Tokenizer.from_vocabulary(description.vocabulary), description.chat_template
    )
    tokenizer, template = read_text_document(raw)
    assert template is not None
    return tokenizer, template


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:12])
def test_ids_equal_those_of_the_original(
    smollm2: tuple[Tokenizer, ChatTemplate], case: dict[str, object]
) -> None:
    tokenizer, _ = smollm2

    ids = tokenizer.encode(str(case["text"]), parse_special=True)

    assert ids == case["ids"]
    assert tokenizer.decode(ids, skip_special=False) == case["text"]


def test_a_conversation_without_system_message_gets_the_models_own(
    smollm2: tuple[Tokenizer, ChatTemplate],
) -> None:
    _, template = smollm2

    assert template.render([ChatMessage("user", "What is a cell?")]) == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\n"
        "What is a cell?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_given_system_message_replaces_it(smollm2: tuple[Tokenizer, ChatTemplate]) -> None:
    _, template = smollm2
    messages = [
        ChatMessage("system", "Answer in one word."),
        ChatMessage("user", "2+2?"),
        ChatMessage("assistant", "Four."),
        ChatMessage("user", "3+3?"),
    ]

    assert template.render(messages, add_generation_prompt=False) == (
        "<|im_start|>system\nAnswer in one word.<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n"
        "<|im_start|>assistant\nFour.<|im_end|>\n"
        "<|im_start|>user\n3+3?<|im_end|>\n"
    )


def test_the_prompts_turns_become_control_tokens(smollm2: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = smollm2
    prompt = template.render([ChatMessage("user", "hi")])

    ids = tokenizer.encode(prompt, parse_special=True)

    assert ids.count(1) == 3  # system, user, assistant
    assert ids.count(2) == 2
