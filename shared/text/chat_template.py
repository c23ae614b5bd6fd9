"""Turns a conversation into the prompt text that a model was trained on. Knows no token ids.

Templates are Jinja, from model files that others wrote: they run in Jinja's immutable sandbox, with
the same options as Hugging Face's `apply_chat_template`, and what they take and make is bounded.
`strftime_now` is left out on purpose, so that a prompt does not depend on the day.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ModelError, RequestError
from shared.messages import ChatMessage

MAX_TEMPLATE_CHARS = 1 << 16
MAX_PROMPT_CHARS = 1 << 22
MAX_REPEAT = 1 << 16


class _Refused(jinja2.TemplateError):
    """A template called `raise_exception`."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a repetition cannot make a string of gigabytes."""

    intercepted_binops = frozenset(["*", "**"])

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        for value in (left, right):
            if operator == "**" or (isinstance(value, int) and abs(value) > MAX_REPEAT):
                raise jinja2.TemplateError(f"operator {operator} is too large here")
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled template. `bos_token` and `eos_token` are the names it may print."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Raises `ModelError` for a template that is too long or no Jinja."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(
                f"the chat template has {len(source)} characters (limit {MAX_TEMPLATE_CHARS})"
            )
        environment = _Sandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be read: {error!s:.200}") from error
        self.source = source
        self._names = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation, open for the assistant's turn if asked.

        Raises `RequestError` when the template refuses the messages, fails on them, or prints more
        than `MAX_PROMPT_CHARS`.
        """
        turns = [{"role": m.role, "content": m.content} for m in messages]
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(
                messages=turns, add_generation_prompt=add_generation_prompt, **self._names
            ):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise RequestError(
                        f"the messages make a prompt of more than {MAX_PROMPT_CHARS} characters"
                    )
                pieces.append(piece)
        except _Refused as error:
            raise RequestError(
                f"the model's chat template refuses the messages: {error}"
            ) from error
        except RequestError:
            raise
        # A template is foreign code: whatever it raises is its failure, not ours.
        except Exception as error:
            raise RequestError(f"the model's chat template failed: {error!s:.200}") from error
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(str(message)[:200])


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=False, indent=indent)
