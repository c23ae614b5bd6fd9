"""Turns a conversation into the prompt text that a model was trained on. Knows no token ids.

Templates are Jinja, from model files that others wrote: they run in Jinja's immutable sandbox, with
the same options as Hugging Face's `apply_chat_template`, and what they take and make is bounded:
rounds of loops and calls are counted, so that a template cannot keep a process for ever.
`strftime_now` is left out, so that a prompt does not depend on the day; a template that calls it
without asking whether it is there gets one day that never changes.
"""

from __future__ import annotations

import functools
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_format
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.errors import ErrorCode, ModelError, RequestError
from shared.messages import ChatMessage
from shared.text.response_format import CALL_BEGIN
from shared.text.tools import Turn

MAX_TEMPLATE_CHARS = 1 << 16
MAX_PROMPT_CHARS = 1 << 22
MAX_REPEAT = 1 << 16
MAX_STEPS = 1 << 18  # a message takes about ten; all of them about a second

_WIDTH = re.compile(r"\d{6}")
_SAME_DAY = date(2024, 7, 26)  # the one that templates of Llama 3 have for when there is no clock
_ASKS_FOR_CLOCK = re.compile(r"\bstrftime_now\s+is\s+(not\s+)?defined\b")
_DATE_FORMAT = re.compile(r"(?:[^%]|%-?[aAbBdejmyY%])*")
_ROUNDS, _CONCAT = "_rounds", "_concat"


class _Refused(jinja2.TemplateError):
    """A template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}`: marks what a model wrote, for training; here it is what is in it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja's own declare it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which neither time nor a value grows without bound."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self._renders = threading.local()  # steps left of what this thread renders
        for name, function in list(self.filters.items()):
            self.filters[name] = self._bounded(function)
        self.filters[_ROUNDS] = self._rounds
        self.filters[_CONCAT] = lambda parts: self._checked("".join(map(str, parts)))

    def begin(self) -> None:
        """A render begins in this thread: it has all of its steps."""
        self._renders.steps = MAX_STEPS

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        for value in (left, right):
            if operator == "**" or (
                operator != "+" and isinstance(value, int) and abs(value) > MAX_REPEAT
            ):
                raise jinja2.TemplateError(f"operator {operator} is too large here")
        if operator == "%" and isinstance(left, str):
            raise jinja2.TemplateError("operator % is for numbers here")
        return self._checked(super().call_binop(context, operator, left, right))

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kw: Any) -> Any:
        self._count()
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):  # perhaps one with widths in it, of `format`
            _check_widths(owner)
        _check_numbers((*args, *kw.values()))
        return self._checked(super().call(context, function, *args, **kw))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Put a count into every loop, and a bound on every `~` and captured block."""
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            if loop.recursive:
                raise jinja2.TemplateError("recursive loops are not supported")
            loop.iter = _filtered(loop.iter, _ROUNDS)
        for block in tree.find_all(nodes.AssignBlock):
            block.filter = _filtered(block.filter, "string")
        self._bound_concats(tree)
        return tree

    def _bound_concats(self, node: nodes.Node) -> None:
        for name, value in list(node.iter_fields()):
            if isinstance(value, nodes.Concat):
                setattr(node, name, _filtered(nodes.List(value.nodes), _CONCAT))
            elif isinstance(value, list):
                value[:] = [
                    _filtered(nodes.List(v.nodes), _CONCAT) if isinstance(v, nodes.Concat) else v
                    for v in value
                ]
        for child in node.iter_child_nodes():
            self._bound_concats(child)

    def _bounded(self, function: Any) -> Any:
        @functools.wraps(function)  # keeps what Jinja has noted on it: pass_context and the like
        def run(*args: Any, **kw: Any) -> Any:
            self._count()
            if function is do_format:
                _check_widths(str(args[0]))
            _check_numbers((*args, *kw.values()))
            return self._checked(function(*args, **kw))

        return run

    def _rounds(self, values: Any) -> Iterator[Any]:
        for value in values:
            self._count()
            yield value

    def _count(self) -> None:
        steps = getattr(self._renders, "steps", MAX_STEPS)
        if steps <= 0:
            raise jinja2.TemplateError(f"it takes more than {MAX_STEPS} steps")
        self._renders.steps = steps - 1

    def _checked(self, value: Any) -> Any:
        if isinstance(value, str | list | tuple | dict) and len(value) > MAX_PROMPT_CHARS:
            raise jinja2.TemplateError(f"a value is larger than {MAX_PROMPT_CHARS}")
        return value


def _check_numbers(values: Iterable[Any]) -> None:
    """A width or a count makes a string of its size."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_REPEAT:
            raise jinja2.TemplateError("a number is too large here")


def _check_widths(text: str) -> None:
    if _WIDTH.search(text):
        raise jinja2.TemplateError("a width is too large here")


def _filtered(node: nodes.Node | None, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None)


class ChatTemplate:
    """A compiled template. `bos_token` and `eos_token` are the names it may print."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Raises `ModelError` for a template that is too long or no Jinja."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelError(
                f"the chat template has {len(source)} characters (limit {MAX_TEMPLATE_CHARS})"
            )
        environment = self._environment = _Sandbox()
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        if not _ASKS_FOR_CLOCK.search(source):
            environment.globals["strftime_now"] = _same_day
        try:
            self._template = environment.from_string(source)
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template cannot be read: {error!s:.200}") from error
        self.source = source
        # Of those that know tools, only what has the calls written as they are looked for.
        self.knows_tools = "tools" in names and CALL_BEGIN in source
        self._names = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """`render_turns` of messages of text."""
        turns = [{"role": m.role, "content": m.content} for m in messages]
        return self.render_turns(turns, add_generation_prompt=add_generation_prompt)

    def render_turns(
        self,
        turns: Sequence[Turn],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt text of a conversation, open for the assistant's turn if asked.

        `tools` are for templates that know them. Raises `RequestError` when the template refuses
        the messages, fails on them, or prints more than `MAX_PROMPT_CHARS`.
        """
        pieces: list[str] = []
        num_chars = 0
        self._environment.begin()
        try:
            for piece in self._template.generate(
                messages=list(turns),
                tools=list(tools) or None,  # as Hugging Face has it
                add_generation_prompt=add_generation_prompt,
                **self._names,
            ):
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise RequestError(
                        f"the messages make a prompt of more than {MAX_PROMPT_CHARS} characters",
                        code=ErrorCode.CONTEXT_LENGTH,
                        param="messages",
                    )
                pieces.append(piece)
        except _Refused as error:
            raise RequestError(
                f"the model's chat template refuses the messages: {error}", param="messages"
            ) from error
        except RequestError:
            raise
        # A template is foreign code: whatever it raises is its failure, not ours.
        except Exception as error:
            raise RequestError(
                f"the model's chat template failed: {error!s:.200}", param="messages"
            ) from error
        return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(str(message)[:200])


def _same_day(text: str) -> str:
    if not _DATE_FORMAT.fullmatch(text):
        raise jinja2.TemplateError(f"the date format {text[:40]!r} is not supported")
    return _SAME_DAY.strftime(text)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(value, ensure_ascii=False, indent=indent)
