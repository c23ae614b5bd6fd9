"""Which tokens may come next so that an answer stays what was asked for. Knows no logits or queue.

The state is a function of the tokens that were generated, and of nothing else: any worker builds it
anew from them. The grammars are llguidance's (https://github.com/guidance-ai/llguidance): unlike
xgrammar it needs no torch, and beside a model it takes 20 MB. It is imported by the first request
that asks for it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from shared.errors import RequestError
from shared.text.response_format import ResponseFormat
from shared.text.token_bytes import TokenTable

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_GRAMMARS = 8
MAX_CALLS = 16  # of one answer
# Of the grammar that was made here: it means nothing to who sent the schema.
_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
# A space, or a line that is indented: without a bound, small models fill the answer with blanks.
_BLANK = r"( |\n[ \t]{0,32})"
# Without \u: half a surrogate pair is no text, and every other character may be written as it is.
_ESCAPES = 'nrbtf\\"'


class GrammarError(RequestError):
    """A grammar that cannot be compiled, or whose next tokens take too much to find."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="response_format")


def grammar_of(wanted: ResponseFormat) -> str:
    """The grammar of a format, as llguidance reads it."""
    # Without forcing, a mask depends on bytes alone, not on how a tokenizer would cut them.
    lines = ['%llguidance {"no_forcing": true}']
    if wanted.schema is not None:
        return "\n".join([*lines, f"start: %json {_json_rule(wanted.schema)}"])
    calls = " | ".join(f"call{i}" for i in range(len(wanted.functions)))
    more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if wanted.parallel else ""
    lines += [f"start: call{more}", f"call: {calls}"]
    for i, function in enumerate(wanted.functions):
        head, tail = (json.dumps(part) for part in function.call_frame())
        lines += [
            f"call{i}: {head} arguments{i} {tail}",
            f"arguments{i}: %json {_json_rule(function.parameters)}",
        ]
    return "\n".join(lines)


@lru_cache(maxsize=64)
def check_grammar(wanted: ResponseFormat) -> None:
    """Compile without a vocabulary, in at most about a second; what is fine is remembered.

    Raises `GrammarError` for what cannot be, or is too large.
    """
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(grammar_of(wanted), None, limits=_limits())
    if error:
        raise GrammarError(f"the schema cannot be compiled: {_first_line(error)}")


class Grammars:
    """Compiled grammars for one vocabulary, the last `MAX_GRAMMARS` of them.

    `read_table` is called by the first; `end_ids` end an answer. Not for several threads at once.
    """

    def __init__(self, read_table: Callable[[], TokenTable], end_ids: Sequence[int]) -> None:
        self._read_table = read_table
        self._end_ids = list(end_ids)
        self._tokenizer: LLTokenizer | None = None
        self._vocab_size = 0
        self._matchers: OrderedDict[ResponseFormat, LLMatcher] = OrderedDict()

    @property
    def num_compiled(self) -> int:
        return len(self._matchers)

    def begin(self, wanted: ResponseFormat) -> Constraint:
        """The state of an answer of which nothing is generated. Raises `GrammarError`."""
        matcher = self._matchers.get(wanted)
        if matcher is None:
            from llguidance import LLMatcher

            matcher = LLMatcher(
                self._vocabulary(), grammar_of(wanted), log_level=0, limits=_limits()
            )
            _check(matcher)
            self._matchers[wanted] = matcher
            if len(self._matchers) > MAX_GRAMMARS:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(wanted)
        return Constraint(matcher.deep_copy(), self._end_ids, self._vocab_size)

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            table = self._read_table()
            self._vocab_size = len(table.tokens)
            # No slices: they would save 40 us a token inside of texts, and cost 11 MB.
            self._tokenizer = LLTokenizer(
                _Vocabulary(table, self._end_ids),  # type: ignore[arg-type]
                n_vocab=len(table.tokens),
                eos_token=self._end_ids,
                slices=[],
            )
        return self._tokenizer


class Constraint:
    """The state of one answer, a `LogitsProcessor`. Made by `Grammars`; V vocab_size."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._vocab_size = vocab_size

    def allowed(self) -> npt.NDArray[np.bool_]:
        """Which tokens (V,) may come next.

        When the answer is complete and nothing may be added, these are the end tokens alone. Raises
        `GrammarError` for a state that is too complex to go on with.
        """
        if self._matcher.is_stopped():
            _check(self._matcher)
            mask = np.zeros(self._vocab_size, np.bool_)
            mask[self._end_ids] = True
            return mask
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not mask.any():
            _check(self._matcher)
            raise GrammarError("no token may follow in this format")
        return mask

    def process(self, logits: npt.NDArray[np.float32]) -> None:
        """Forbid, in logits (V or more,), what may not come next."""
        mask = self.allowed()
        np.copyto(logits[: self._vocab_size], -np.inf, where=~mask)
        logits[self._vocab_size :] = -np.inf

    def advance(self, token_id: int) -> None:
        """Take the next token. Raises `GrammarError` for one that may not come next."""
        if token_id in self._end_ids:
            return  # nothing follows
        self._matcher.consume_token(token_id)
        _check(self._matcher)


class _Vocabulary:
    """What llguidance asks of a tokenizer. Without forcing it never asks it to cut a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, end_ids: Sequence[int]) -> None:
        self.tokens = table.tokens
        self.special_token_ids = sorted(table.special_ids)
        self.eos_token_id = end_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError(f"grammars are without forcing, yet {text!r:.40} is to be cut")


def _json_rule(schema: Any) -> str:
    options = {"whitespace_pattern": _BLANK, "json_allowed_escapes": _ESCAPES}
    body = {} if schema is True else schema
    return json.dumps({**body, "x-guidance": options}, ensure_ascii=False)


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(
        initial_lexer_fuel=1_000_000,  # 20 ms
        step_lexer_fuel=200_000,  # 15 ms
        step_max_items=50_000,  # 3 ms
        max_lexer_states=10_000,  # 8 MB
        max_grammar_size=50_000,
        verbose_errors=False,  # they would tell of what users wrote
    )


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(f"the format is too complex: {_first_line(matcher.get_error())}")


def _first_line(error: str) -> str:
    line = next((line.strip() for line in error.splitlines() if line.strip()), "")
    return _PLACE.sub("", line)[:200]
