"""Bounds what a turn holds beside the steps that somebody waits for. Pure: no clock.

Prefill is bounded while others decode, by what turns took of late; steps of batches while there
are any others.

A decode step that arrives while a turn runs waits for its end, and so does the token after it at
the next group. So a turn's prefill may take about as long as a few decode turns, whatever machine
this is; where nobody decodes, slices are as large as the row budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from services.worker.batch import Pending, Slice
from shared.prefill import MIN_ROWS, rows_beside_decoding

# One stream beside 32 requests of a batch, 2 groups on 2 busy cores, medians of rounds: the time
# between two of its tokens was 5.6 times that alone, and the batch had 145 tokens/s. At 8 it is 2.6
# times and 340, at 4 2.4 and 115, at 2 2.0 and 75.
BATCH_STEPS = 2
WEIGHT = 0.2  # of the newest turn in the means
LATELY_S = 0.5  # a stream that had a turn since then is on its way round the other groups


class Pace:
    """What decode turns and rows of prefill take, exponentially smoothed; seconds."""

    def __init__(self) -> None:
        self.decode_turn_s = 0.0
        self.row_s = 0.0
        self._decoded_s = -math.inf
        self._num_decoding = 0
        self._awaited_s = -math.inf

    def prefill_rows(self, pending: Iterable[Pending], *, now_s: float, max_rows: int) -> int:
        """How many rows of prefill the next turn may hold, given all that waits.

        The more prompts wait for each stream that decodes, the more of a turn is theirs.
        """
        num_prompts = num_decoding = 0
        for item in pending:
            if item.is_prefill:
                num_prompts += 1
            else:
                num_decoding += 1
        if num_decoding:
            self._decoded_s = now_s
            self._num_decoding = max(num_decoding, self._num_decoding)
        elif now_s - self._decoded_s > LATELY_S:
            self._num_decoding = 0
            return max_rows
        return rows_beside_decoding(
            self.decode_turn_s,
            self.row_s,
            num_prompts=num_prompts,
            num_decoding=self._num_decoding,
            max_rows=max_rows,
        )

    def batch_steps(self, pending: Iterable[Pending], *, now_s: float) -> int | None:
        """How many steps of batches the next turn may hold, given all that waits; None for all."""
        if any(not item.step.is_batch for item in pending):
            self._awaited_s = now_s
        return BATCH_STEPS if now_s - self._awaited_s <= LATELY_S else None

    def note(self, slices: Sequence[Slice], took_s: float) -> None:
        """A turn over these slices took so long, from its first look to its last ack."""
        num_rows = sum(piece.num_rows for piece in slices if piece.pending.is_prefill)
        num_decoding = sum(not piece.pending.is_prefill for piece in slices)
        if not num_rows:
            self._num_decoding = num_decoding
            self.decode_turn_s = _smoothed(self.decode_turn_s, took_s)
        elif num_rows >= MIN_ROWS:  # of fewer the turn's own cost would be taken for theirs
            rest_s = took_s - self.decode_turn_s if num_decoding else took_s
            self.row_s = _smoothed(self.row_s, max(rest_s, 0.0) / num_rows)


def _smoothed(mean: float, newest: float) -> float:
    return mean + WEIGHT * (newest - mean) if mean else newest
