"""How much of a prompt runs in a turn beside those who decode. Pure: no message, no clock.

A decode step that arrives while a turn runs waits for its end, so a turn's prefill may take about
as long as a few decode turns, whatever machine this is.
"""

from __future__ import annotations

# 8 streams and a prompt of 512 on 2 busy cores, medians of `bench cluster --mixed`: at 2.0 a prompt
# took 1.4 to 1.7 times its time alone and the streams' p95 between two tokens 2.0 to 2.5 times
# theirs; at 2.5 it was 1.2 to 1.9 and 2.7 to 2.9.
DECODE_TURNS = 2.5
TILE_ROWS = 8  # with 8 decode steps a batch fills tiles of 16
MIN_ROWS = 16


def rows_beside_decoding(
    decode_turn_s: float, row_s: float, *, num_prompts: int, num_decoding: int, max_rows: int
) -> int:
    """Rows of prefill for the next turn, at most `max_rows`.

    `decode_turn_s` and `row_s` are what a decode turn and a row of prefill take of late, 0 where
    that is not known. The more prompts wait for each stream that decodes, the more of a turn is
    theirs.
    """
    if not (decode_turn_s and row_s):
        return min(2 * MIN_ROWS, max_rows)
    turns = DECODE_TURNS * max(1.0, num_prompts / num_decoding)
    # A clock may say that rows take next to nothing, and infinity is no number of them.
    rows = int(min(turns * decode_turn_s / row_s, 2.0 * max_rows))
    rows = rows // TILE_ROWS * TILE_ROWS
    return min(max(rows, MIN_ROWS), max_rows)
