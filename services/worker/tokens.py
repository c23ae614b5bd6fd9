"""Draws and commits the tokens of the last layer group. Knows no queue.

R rows to sample, D hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.worker.batch import Slice
from services.worker.draft_policy import common_prefix
from services.worker.shaping import NotYet, Shaping
from services.worker.steps import following_step
from services.worker.verdict import finish_reason
from shared.errors import (
    DecodeError,
    ErrorCode,
    ModelError,
    PermanentError,
    RequestError,
    StoreDamaged,
)
from shared.logprobs import TokenLogprobs
from shared.messages import Step
from shared.model.layer_group import LayerGroup
from shared.model.logits import LogitsProcessor
from shared.model.logprobs import token_logprobs
from shared.model.sampling import sample
from shared.store.ledger_base import RequestLedger
from shared.store.ledger_types import AlreadyCommitted, Commit, CommitResult, Committed, Gap, Stale

# A record that cannot be read, a form that cannot be kept, no vocabulary to keep it with.
_ITS_OWN = (StoreDamaged, DecodeError, RequestError, ModelError)


@dataclass(frozen=True, slots=True)
class GoOn:
    """The tokens are on record and the request continues with this decode step.

    `is_first` unless somebody had put them there before.
    """

    token_ids: tuple[int, ...]
    step: Step
    is_first: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing follows: the request ended, or this step's effect is stale or unwanted."""


@dataclass(frozen=True, slots=True)
class OutOfOrder:
    """The tokens before these were lost, or none may follow: the request cannot go on."""

    reason: str
    code: ErrorCode


@dataclass(frozen=True, slots=True)
class Early:
    """The tokens before these are not on record yet: look again when they are."""


@dataclass(frozen=True, slots=True)
class Behind:
    """Later tokens are on record, and whoever put them there may have died over what followed."""


Outcome = GoOn | Ended | OutOfOrder | Early | Behind


class Drawn:
    """The tokens of a batch: drawn, sent to the record, told of."""

    def __init__(self, pieces: Sequence[Slice]) -> None:
        """Of slices that end their steps; nothing is drawn yet."""
        self._pieces = pieces
        self._refused: dict[int, Outcome] = {}  # by number of the slice
        self._drawn: list[tuple[int, Commit, Sequence[LogitsProcessor]]] = []
        self._expected: dict[int, Outcome] = {}
        self._wait: Callable[[], list[CommitResult | StoreDamaged]] = list

    def draw(
        self,
        rows: npt.NDArray[np.float32],
        layer_group: LayerGroup,
        shaping: Shaping,
    ) -> None:
        """Sample. `rows` (R, D) are, of each slice, the last row of known tokens and all of its
        draft. Raises `StoreUnavailable`."""
        if not self._pieces:
            return
        logits = layer_group.head(rows)  # (R, V)
        start = 0
        for number, piece in enumerate(self._pieces):
            end, step = start + 1 + len(piece.draft), piece.pending.step
            mine, start = slice(start, end), end
            try:
                processors = shaping.take(step)
                if processors is None:
                    continue
                if isinstance(processors, NotYet):
                    self._refused[number] = Early()
                    continue
                values, largest = logits.values[mine], logits.largest[mine]
                commit = _draw(step, piece.draft, values, largest, processors)
            except _ITS_OWN as error:  # of this request alone
                self._refused[number] = OutOfOrder(str(error), _code_of(error))
                continue
            self._drawn.append((number, commit, processors))

    def expected(self) -> list[Outcome]:
        """What follows if nobody else was first, as is nearly always so."""
        self._expected = {
            number: _outcome(self._pieces[number], commit, Committed())
            for number, commit, _ in self._drawn
        }
        return [
            self._expected.get(number, outcome)
            for number, outcome in enumerate(self._without_commits())
        ]

    def commit(self, ledger: RequestLedger) -> None:
        """Send the commits; `outcomes` waits for their answers. Raises `StoreUnavailable`."""
        if self._drawn:
            self._wait = ledger.start_commits([commit for _, commit, _ in self._drawn])

    def outcomes(self, shaping: Shaping) -> list[Outcome]:
        """Waits for what became of each commit; to be called once. Raises `StoreUnavailable`; a
        repeat of all is harmless after that, since the first commit of a position wins."""
        outcomes = self._without_commits()
        for (number, commit, processors), result in zip(self._drawn, self._wait(), strict=True):
            piece = self._pieces[number]
            if isinstance(result, Committed) and number in self._expected:
                outcome = self._expected[number]
            else:
                outcome = _outcome(piece, commit, result)
            outcomes[number] = outcome
            if isinstance(outcome, GoOn) and outcome.token_ids == tuple(commit.token_ids):
                shaping.keep(piece.pending.step, processors, commit.token_ids)
        return outcomes

    def _without_commits(self) -> list[Outcome]:
        return [self._refused.get(number, Ended()) for number in range(len(self._pieces))]


def _code_of(error: PermanentError) -> ErrorCode:
    match error:
        case RequestError():
            return error.code
        case ModelError():
            return ErrorCode.FAILED
        case _:
            return ErrorCode.LOST


def _outcome(piece: Slice, commit: Commit, result: CommitResult | StoreDamaged) -> Outcome:
    token_ids, reason = commit.token_ids, commit.finish
    match result:
        case Committed():
            pass
        case StoreDamaged():  # of this request alone: its neighbours go on
            return OutOfOrder(str(result), ErrorCode.LOST)
        case Gap():
            return Early()
        case AlreadyCommitted(token_ids=winners, finish=won):
            # The commit happened, the publish perhaps not: send the same output again.
            token_ids, reason = winners, won
        case Stale() if piece.pending.came_before:
            return Behind()
        case _:
            # Of a request that ended or moved on, or one whose store lost its last second: from
            # what is left the scheduler drives it on.
            return Ended()
    if reason is not None:
        return Ended()
    # Of a repeat with another draft, or without one, the rows may be fewer than the tokens.
    num_computed = min(common_prefix(piece.draft, token_ids), len(token_ids) - 1)
    following = following_step(piece.pending.step, token_ids=token_ids, num_computed=num_computed)
    return GoOn(tuple(token_ids), following, isinstance(result, Committed))


def _draw(
    step: Step,
    draft: Sequence[int],
    logits: npt.NDArray[np.float32],
    largest: Sequence[int],
    processors: Sequence[LogitsProcessor],
) -> Commit:
    """The tokens that follow, from logits (1 + len(draft), V), and why the request ends with them.
    `largest` are those of the rows.

    A row counts as long as the tokens before it are those that it was computed from. The
    `processors` have seen those before the step's end, and see those that are drawn.
    """
    params = step.sampling
    assert params.seed is not None, "a step always carries its seed"
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for row, most, guessed in zip(logits, largest, (*draft, None), strict=True):
        position = step.end_position + len(token_ids)
        token_id = sample(
            row,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=params.seed,
            position=position,
            min_p=params.min_p,
            processors=processors,
            largest=most,
        )
        token_ids.append(token_id)
        if params.logprobs is not None:
            logprobs.append(token_logprobs(row, token_id, params.logprobs))
        for processor in processors:
            processor.advance(token_id)
        reason = finish_reason(step, token_id=token_id, position=position)
        if reason is not None or token_id != guessed:
            break
    return Commit(step.request_id, step.epoch, step.end_position, token_ids, reason, logprobs)
