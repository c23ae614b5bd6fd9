"""Chat templates: what they print, and that foreign ones cannot do harm."""

from __future__ import annotations

import pytest

from shared.errors import ModelError, RequestError
from shared.messages import ChatMessage
from shared.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from shared.text.prompt import chat_token_ids
from tests.gguf_files import CHAT_TEMPLATE
from tests.rig_model import rig_tokenizer

HELLO = (ChatMessage("user", "Hello"),)


def test_turns_are_printed_in_order_and_the_answer_is_opened() -> None:
    template = ChatTemplate(CHAT_TEMPLATE)
    messages = (ChatMessage("system", "Be brief."), *HELLO)

    assert template.render(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert template.render(HELLO, add_generation_prompt=False) == (
        "<|im_start|>user\nHello<|im_end|>\n"
    )


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    template = ChatTemplate(
        "{% for m in messages %}\n    {% if true %}\nx\n{% endif %}{% endfor %}"
    )

    assert template.render(HELLO) == "x\n"


def test_token_names_and_tojson_are_there() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | tojson }}", bos_token="<s>")

    assert template.render((ChatMessage("user", "<é>"),)) == (
        '<s>[{"role": "user", "content": "<é>"}]'
    )


def test_what_a_template_refuses_is_the_requests_error() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")

    with pytest.raises(RequestError, match="refuses the messages: roles must alternate"):
        template.render(HELLO)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[7].role }}",
        "{{ 1 / 0 }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% for i in range(10000000) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 60000 }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_misbehaves_is_stopped(source: str) -> None:
    template = ChatTemplate(source)

    with pytest.raises(RequestError):
        template.render(HELLO)


@pytest.mark.parametrize("source", ["{% for %}", "{{ a", "x" * (MAX_TEMPLATE_CHARS + 1)])
def test_what_is_no_template_is_refused_at_once(source: str) -> None:
    with pytest.raises(ModelError, match="chat template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f2() }}{{ f2() }}{% endmacro %}{% macro f2() %}{% endmacro %}"
        "{% for a in range(99999) %}{% for b in range(99) %}{{ f() }}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}"
        "{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set n.s = n.s|replace('a', 'aa') %}{% endfor %}",
        "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s %}{{ n.s }}{{ n.s }}"
        "{% endset %}{% endfor %}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 'a'|center(1000000000) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
    ],
)
def test_a_template_cannot_run_for_ever_or_take_all_memory(source: str) -> None:
    template = ChatTemplate(source)

    with pytest.raises(RequestError, match="template failed"):
        template.render(HELLO)


def test_steps_are_counted_anew_for_each_render() -> None:
    template = ChatTemplate("{% for a in range(60000) %}{% endfor %}ok")

    assert [template.render(HELLO) for _ in range(40)] == ["ok"] * 40


def test_loops_keep_what_templates_ask_of_them() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}"
        "{{ loop.previtem.content if loop.previtem }}{% endfor %}"
        "{{ 'a' ~ 1 ~ none }}{{ messages[0]['content'] + 'x' }}"
    )

    assert template.render((ChatMessage("user", "q"), ChatMessage("user", "r"))) == (
        "0TrueFalse2" + "1FalseTrue2q" + "a1None" + "qx"
    )


def test_more_messages_than_positions_are_refused_unrendered() -> None:
    class Unused(ChatTemplate):
        def render(self, *_: object, **__: object) -> str:
            raise AssertionError("it takes seconds in which nobody else is served")

    messages = [ChatMessage("user", "x")] * 256

    with pytest.raises(RequestError, match="256 messages, and the model holds 256 positions"):
        chat_token_ids(messages, rig_tokenizer(), Unused(CHAT_TEMPLATE), max_positions=256)


def test_what_a_template_marks_for_training_is_printed() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{%- generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    )

    assert template.render(HELLO * 2) == "[Hello][Hello]"
    with pytest.raises(ModelError, match="endgeneration"):
        ChatTemplate("{% generation %}x")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # SmolLM3 calls it whether it is there or not
        ('{%- set today = strftime_now("%d %B %Y") -%}{{ today }}', "26 July 2024"),
        # Llama 3.2 asks
        ("{% if strftime_now is defined %}now{% else %}26 Jul 2024{% endif %}", "26 Jul 2024"),
        ("{% if not strftime_now is defined %}26 Jul 2024{% endif %}", "26 Jul 2024"),
    ],
)
def test_a_prompt_does_not_depend_on_the_day(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(HELLO) == expected


@pytest.mark.parametrize("text", ["%99999d", "%s", "%", "%E"])
def test_a_date_format_that_is_no_plain_one_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="date format"):
        ChatTemplate("{{ strftime_now(" + repr(text) + ") }}").render(HELLO)
