"""Keeps what shapes a request's logits in step with its tokens. Knows no kernel and no queue.

It is a function of what was asked and of the tokens so far, and a step carries neither: both are
in the ledger. The worker of the last group makes the processors from there once, keeps them beside
the sequence's KV rows and tells them each token that it commits. Where it has none that have seen
exactly the tokens before a step (the first one, a repeat, one that was driven again, or that
another worker had before), they are made anew: so they never depend on what happened on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.worker.sequences import SequencePool, Shape
from shared.messages import Step
from shared.model.logits import LogitsProcessor, make_processors
from shared.store.ledger_base import RequestLedger
from shared.store.ledger_types import LedgerRecord
from shared.text.constraint import Grammars

MakeProcessors = Callable[[LedgerRecord], Sequence[LogitsProcessor]]
"""The processors of a request at its first token, in the order in which they are applied."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """The ledger does not hold all tokens before: none may be committed after them either."""


class Shaping:
    """The processors of the sequences of one worker that serves the last layer group, `group`."""

    def __init__(
        self, pool: SequencePool, ledger: RequestLedger, group: int, make: MakeProcessors
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._group = group
        self._make = make

    def take(self, step: Step) -> Sequence[LogitsProcessor] | NotYet | None:
        """Processors for the token at `step.end_position`; () for a request that has none.

        They are the caller's, to advance with each token that is drawn, until `keep`: whatever
        happens in between, nobody uses half-advanced ones. None when the ledger does not know the
        request.

        Raises `StoreUnavailable`; `StoreDamaged` or `DecodeError` for what cannot be read; and
        `RequestError` for a form that cannot be kept.
        """
        if not step.shaped:
            return ()
        state = self._pool.peek(self._group, step.request_id)
        if state is not None:
            shape, state.shape = state.shape, None
            if shape is not None and (shape.epoch, shape.position) == (
                step.epoch,
                step.end_position,
            ):
                return shape.processors
        return self._read(step)

    def keep(
        self, step: Step, processors: Sequence[LogitsProcessor], token_ids: Sequence[int]
    ) -> None:
        """Keep processors that have seen `token_ids`, which are on record from the step's end."""
        state = self._pool.peek(self._group, step.request_id) if processors else None
        if state is not None:
            state.shape = Shape(processors, step.epoch, step.end_position + len(token_ids))

    def _read(self, step: Step) -> Sequence[LogitsProcessor] | NotYet | None:
        record = self._ledger.get(step.request_id)
        if record is None:
            return None
        num_generated = step.end_position - record.num_prompt_tokens
        generated = self._ledger.tokens(step.request_id) if num_generated > 0 else []
        if not 0 <= num_generated <= len(generated):
            return NotYet()
        processors = self._make(record)
        for token_id in generated[:num_generated]:
            for processor in processors:
                processor.advance(token_id)
        return processors


def processors_with(grammars: Grammars) -> MakeProcessors:
    """What makes the processors of requests, also of those whose answer must have a form."""

    def make(record: LedgerRecord) -> Sequence[LogitsProcessor]:
        processors = processors_of(record)
        if record.response_format is None:
            return processors
        return [*processors, grammars.begin(record.response_format)]

    return make


def processors_of(record: LedgerRecord) -> list[LogitsProcessor]:
    """What the sampling parameters of a request ask for."""
    sampling = record.sampling
    return make_processors(
        prompt=record.prompt_token_ids,
        logit_bias=sampling.logit_bias,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
    )
