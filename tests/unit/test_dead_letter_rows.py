"""What `dead list` and `dead show` make of a letter: nothing stands for what is not known."""

from __future__ import annotations

from services.cli.operate import letter_dict, letter_line, letter_rows
from shared.dead_letters import DeadLetter
from shared.dead_queue import Letter

NOW_MS = 1_800_000_000_000
HISTORY = DeadLetter(
    "killed 3 workers",
    group=0,
    attempts=3,
    workers=("a", "b"),
    died_unix_ms=NOW_MS - 3_700_000,
)
KNOWN = Letter("0a", "step", "r-1", 9, 0, 4, history=HISTORY)
UNKNOWN = Letter("0b", "garbage", "", 8, problem="not a frame")


def test_the_list_tells_how_old_a_letter_is() -> None:
    assert "1 h ago group 0 position 4  killed 3 workers" in letter_line(KNOWN, NOW_MS)
    assert "ago" not in letter_line(UNKNOWN, NOW_MS)
    assert letter_line(UNKNOWN, NOW_MS).endswith("not a frame")


def test_rows_of_the_history_are_readable_and_empty_ones_are_left_out() -> None:
    rows = [row for row in letter_rows(letter_dict(KNOWN), NOW_MS) if row.startswith("history")]
    told = [row.split(maxsplit=1)[1] for row in rows]

    assert told[:2] == ["reason: killed 3 workers", "group: 0"]
    assert "workers: a, b" in told
    assert told[-1].startswith("died: ")
    assert told[-1].endswith(", 1 h ago")
    assert not any("history" in row for row in letter_rows(letter_dict(UNKNOWN), NOW_MS))


def test_what_is_not_known_of_a_letter_is_null_as_json() -> None:
    assert set(letter_dict(UNKNOWN)["history"].values()) == {None}
    assert letter_dict(KNOWN)["history"]["group"] == 0
