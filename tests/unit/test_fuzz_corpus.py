"""What the fuzzers start from, and what they once found, goes through their targets in CI too."""

from __future__ import annotations

import pytest

from tests.fuzz.guided import TARGETS, corpus_of, load_target
from tests.kernel_backends import native_or_skip


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_of_the_corpus_is_taken_or_refused(name: str) -> None:
    if name == "chunks":
        native_or_skip()
    target = load_target(name)
    inputs = corpus_of(name)

    for path in inputs:
        target.one_input(path.read_bytes())

    assert {path.name for path in inputs} >= set(target.seeds())
