"""Adds drafts to the decode steps of the last group. Knows no kernel and sends nothing.

What it needs of a sequence is the text so far, from the ledger; whatever goes wrong with that only
means that nothing is guessed.
"""

from __future__ import annotations

from services.worker.guesser import Guesser
from services.worker.sequences import SequencePool, SequenceState
from services.worker.steps import with_draft
from services.worker.verdict import TOKEN_IDS
from shared.errors import DecodeError, StoreDamaged, StoreUnavailable
from shared.messages import Step
from shared.store.ledger_base import RequestLedger

# After a re-drive, or when another worker had a turn: a lost draft costs a re-drive, and reading
# the text again some milliseconds.
QUIET_TOKENS = 64


class Speculation:
    """The drafts of one worker that serves the last layer group, `group`."""

    def __init__(self, pool: SequencePool, ledger: RequestLedger, group: int) -> None:
        self._pool = pool
        self._ledger = ledger
        self._group = group

    def drafted(self, step: Step, *, num_sequences: int) -> Step:
        """A decode step for group 0 with guessed tokens, or as it is.

        `num_sequences` share the batches that it will be in, as far as is known.
        """
        state = self._pool.peek(self._group, step.request_id)
        if state is None or not step.sampling.speculation:
            return step
        guesser = self._guesser(state, step)
        # The last token of all is sampled and never fed back.
        longest = step.max_position - step.end_position
        if guesser is None or step.num_positions > 1 or longest < 1:
            return step
        draft = guesser.guess(num_sequences=num_sequences, longest=longest)
        return with_draft(step, draft) if draft else step

    def _guesser(self, state: SequenceState, step: Step) -> Guesser | None:
        """The text up to this step; None for now if it is not at hand."""
        token_ids = [*step.accepted, *step.tensors[TOKEN_IDS].tolist()]
        position = step.end_position - len(token_ids)
        if state.guess_epoch != step.epoch:
            state.guesser = None
            state.guess_epoch = step.epoch
            state.quiet_until = position + QUIET_TOKENS if step.epoch else 0
        elif state.guesser is not None and not state.guesser.follow(position, token_ids):
            state.guesser = None
            state.quiet_until = position + QUIET_TOKENS
        if state.guesser is None and position >= state.quiet_until:
            text = self._text(step.request_id, position)
            if text is None:
                state.quiet_until = position + QUIET_TOKENS
            else:
                state.guesser = Guesser([*text, *token_ids])
        return state.guesser

    def _text(self, request_id: str, num_tokens: int) -> list[int] | None:
        """The first `num_tokens` tokens, of prompt and answer; None when they cannot be had."""
        try:
            record = self._ledger.get(request_id)
            if record is None:
                return None
            text = list(record.prompt_token_ids)
            if len(text) < num_tokens:
                text += self._ledger.tokens(request_id)
        except (StoreUnavailable, StoreDamaged, DecodeError):
            return None
        return text[:num_tokens] if len(text) >= num_tokens else None
