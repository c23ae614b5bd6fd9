"""Stop strings, characters and event ids: what of an answer is shown, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.event_ids import EventId, Shown, read_event_id
from services.gateway.reader import EventReader
from shared.api.choice import Choice
from shared.api.errors import ApiError
from shared.api.stops import StopMatcher
from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_types import FinalEvent, LedgerRecord, TokenEvent
from shared.text.tokenizer import Tokenizer
from tests.gguf_files import tiny_vocabulary
from tests.rig import GREEDY
from tests.spelling_model import byte_token

TOKENIZER = Tokenizer.from_vocabulary(tiny_vocabulary())
LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def naive(text: str, stops: Sequence[str]) -> str:
    """The text before the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))]
    return text


@given(pieces=st.lists(LETTERS, max_size=6), stops=STOPS)
def test_stops_are_found_wherever_the_pieces_end(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)

    shown = [matcher.feed(piece) for piece in pieces]
    whole = "".join(shown) + matcher.finish()

    assert whole == naive("".join(pieces), stops)
    so_far = ""
    for number, text in enumerate(shown, 1):
        so_far += text
        seen = "".join(pieces[:number])
        assert naive(seen, stops).startswith(so_far), "nothing is shown that is taken back later"
        held = len(naive(seen, stops)) - len(so_far)
        assert held < max(map(len, stops), default=1), "no more is held back than may be a stop"


def answer_of(text: str, stops: Sequence[str] = ()) -> tuple[Choice, list[str]]:
    """A choice that took a text byte by byte, and the pieces it showed."""
    choice = Choice(0, "r", TOKENIZER, stops)
    tokens = [byte_token(byte) for byte in text.encode()]
    return choice, [choice.take(TokenEvent(f"{i}-0", i, t)) for i, t in enumerate(tokens)]


@given(
    text=st.text(max_size=12), stops=STOPS | st.lists(st.text(min_size=1, max_size=3), max_size=2)
)
def test_the_tokens_that_are_told_of_are_those_whose_text_is_shown(
    text: str, stops: list[str]
) -> None:
    choice = Choice(0, "r", TOKENIZER, stops)
    shown, told = "", []
    raw = text.encode()
    for i, byte in enumerate(raw):
        token = byte_token(byte)
        shown += choice.take(TokenEvent(f"{i}-0", i, token, TokenLogprobs.of(-float(i))))
        told += choice.shown
        assert all(entry.offset < len(shown) for entry in told), "none before its text"
    shown += choice.end(end(FinishReason.STOP))
    told += choice.shown

    assert [entry.logprobs.logprob for entry in told] == [-float(i) for i in range(len(told))]
    assert [entry.offset for entry in told] == [
        offset for offset, char in enumerate(text) for _ in char.encode()
    ][: len(told)]
    assert len(told) == len(shown.encode())


def end(reason: FinishReason, num_generated: int = 0) -> FinalEvent:
    return FinalEvent("9-1", reason, "", 1, num_generated)


@given(text=st.text(max_size=12))
def test_pieces_are_whole_characters_and_join_to_the_text(text: str) -> None:
    choice, pieces = answer_of(text)

    assert "".join(pieces) + choice.end(end(FinishReason.STOP)) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_control_tokens_are_never_shown() -> None:
    choice = Choice(0, "r", TOKENIZER, ())

    shown = [choice.take(TokenEvent(f"{i}-0", i, i)) for i in TOKENIZER.special_token_ids]

    assert shown == ["", "", ""]
    assert choice.num_tokens == 3


def test_a_beginning_of_a_stop_string_is_shown_when_the_text_ends_with_it() -> None:
    choice, pieces = answer_of("to be", ["bee"])

    assert "".join(pieces) == "to "
    assert choice.end(end(FinishReason.LENGTH)) == "be"
    assert choice.finish_reason == "length"


def test_tokens_after_a_stop_string_do_not_count() -> None:
    choice, pieces = answer_of("one. two", ["."])

    assert "".join(pieces) == "one"
    assert (choice.finish_reason, choice.num_tokens) == ("stop", 4)
    assert choice.end(end(FinishReason.ABORT, 8)) == ""
    assert choice.finish_reason == "stop"


@given(
    shown=st.lists(
        st.builds(Shown, st.integers(0, 9_999_999), st.booleans()) | st.just(Shown()),
        min_size=1,
        max_size=5,
    ),
    tail=st.sampled_from(["", "u", "d"]),
)
def test_event_ids_are_read_as_they_were_written(shown: list[Shown], tail: str) -> None:
    event_id = EventId("chatcmpl-0123456789abcdef01234567", tuple(shown), tail)

    assert read_event_id(str(event_id)) == event_id


@given(st.text(max_size=60))
def test_other_event_ids_are_refused(text: str) -> None:
    with pytest.raises(ApiError, match="none of this server's"):
        read_event_id(text)


def test_the_reader_gives_each_feed_all_events_of_its_requests_in_order() -> None:
    stores = connect("memory://")
    ledger = Ledger(stores.meta)
    for name in ("a", "b"):
        record = LedgerRecord(name, "m@0", "l", (1, 2), GREEDY, max_position=9)
        assert ledger.admit(record)

    async def follow() -> list[list[tuple[str, int | None]]]:
        reader = EventReader(ledger, gather_s=0.0)
        reader.start()
        feeds = [reader.open(["a", "b"]), reader.open(["a"])]
        for position in range(2, 6):
            ledger.commit("a", 0, position, [position])
            ledger.commit("b", 0, position, [10 * position])
        late = reader.open(["a"])
        for name in ("a", "b"):
            ledger.finish(name, FinishReason.LENGTH)
        seen: list[list[tuple[str, int | None]]] = []
        for feed, num_ends in ((feeds[0], 2), (feeds[1], 1), (late, 1)):
            found: list[tuple[str, int | None]] = []
            while [token for _, token in found].count(None) < num_ends:
                found += [
                    (name, event.token_id if isinstance(event, TokenEvent) else None)
                    for name, event in await feed.next(5.0)
                ]
            feed.close()
            seen.append(found)
        reader.stop()
        return seen

    both, *alone = asyncio.run(follow())

    of_a = [("a", 2), ("a", 3), ("a", 4), ("a", 5), ("a", None)]
    of_b = [("b", 20), ("b", 30), ("b", 40), ("b", 50), ("b", None)]
    assert [event for event in both if event[0] == "a"] == of_a
    assert [event for event in both if event[0] == "b"] == of_b
    assert alone == [of_a, of_a]
    stores.close()
