"""`docs/failure-model.md` names a test for each row, and the test exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "failure-model.md"


def test_every_row_names_tests_that_exist() -> None:
    defined = {
        name
        for file in TESTS.rglob("test_*.py")
        for name in re.findall(r"^\s*def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]

    named = {row: re.findall(r"`(test_\w+)`", row) for row in rows}

    assert len(rows) > 15
    assert [row for row, names in named.items() if not names] == []
    assert {name for names in named.values() for name in names} - defined == set()
