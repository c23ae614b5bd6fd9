"""The ledger's promises, on every variant of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from shared.errors import ErrorCode, RequestError
from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason, SamplingParams
from shared.store import keys
from shared.store.ledger import Ledger
from shared.store.ledger_base import RequestLedger, token_events
from shared.store.ledger_types import (
    AlreadyCommitted,
    Committed,
    Fenced,
    FinalEvent,
    Finished,
    Gap,
    LedgerRecord,
    RequestState,
    Stale,
    TokenEvent,
    Unknown,
)
from shared.store.memory_ledger import MemoryLedger
from shared.text.response_format import json_format
from tests.contract.conftest import open_stores

RECORD = LedgerRecord(
    request_id="req-1",
    model_id="tiny@0123",
    layout_id="even3",
    prompt_token_ids=(1, 49_151, 7),
    sampling=SamplingParams(0.8, 40, 0.9, 2**64 - 1, 50, True),
    max_position=52,
    stop_token_ids=(0, 2),
    epoch=4,
    created_unix_ms=1_790_000_000_000,
    deadline_unix_ms=1_790_000_060_000,
    content="0a1b",
)


@pytest.fixture(params=["process", "memory", pytest.param("redis", marks=pytest.mark.servers)])
def ledger(request: pytest.FixtureRequest) -> Iterator[RequestLedger]:
    """With one record, in every variant there is."""
    with ExitStack() as opened:
        ledger: RequestLedger = MemoryLedger()
        if request.param != "process":
            ledger = Ledger(opened.enter_context(open_stores(request.param, request)).meta)
        assert ledger.admit(RECORD)
        yield ledger


def test_a_record_keeps_what_few_requests_ask_for(ledger: RequestLedger) -> None:
    sampling = SamplingParams(
        seed=1, min_p=0.1, frequency_penalty=-0.5, presence_penalty=2.0, repetition_penalty=1.1,
        logit_bias=((3, -100.0), (7, 0.5)), logprobs=0,
    )  # fmt: skip
    wanted = json_format({"type": "object", "properties": {"größe": True}}, "")
    asked = dataclasses.replace(
        RECORD, request_id="other", sampling=sampling, response_format=wanted
    )
    assert ledger.admit(asked)

    record = ledger.get("other")

    assert record is not None
    assert record.sampling == sampling
    assert record.response_format == wanted


def test_log_probabilities_stay_with_their_tokens(ledger: RequestLedger) -> None:
    first = TokenLogprobs.of(-0.5, ((11, -0.5), (2, -1.25)))
    others = [TokenLogprobs.of(-3.0, ((5, -0.125), (6, -2.0))), TokenLogprobs.of(0.0, ((9, 0.0),))]
    ledger.commit("req-1", 4, 3, [11], logprobs=[first])
    ledger.commit("req-1", 4, 4, [8, 9], FinishReason.STOP, others)

    result = ledger.commit("req-1", 4, 4, [8, 9], None, others)

    assert result == AlreadyCommitted((8, 9), FinishReason.STOP)
    assert ledger.events("req-1")[:3] == [
        TokenEvent("3-0", 3, 11, first),
        TokenEvent("4-0", 4, 8, others[0]),
        TokenEvent("5-0", 5, 9, others[1]),
    ]
    assert [e.logprobs for e in ledger.events("req-1", "3-0")[:2]] == others  # type: ignore[union-attr]
    assert token_events(ledger, "req-1") == ledger.events("req-1")[:3]
    assert ledger.tokens("req-1") == [11, 8, 9]


def test_a_record_is_read_as_it_was_written(ledger: RequestLedger) -> None:
    got = ledger.get("req-1")

    assert got == dataclasses.replace(RECORD, committed_position=2)
    assert got.num_generated == 0


def test_a_request_that_is_known_is_adopted_not_overwritten(ledger: RequestLedger) -> None:
    ledger.commit("req-1", 4, 3, [11])

    admitted = ledger.admit(dataclasses.replace(RECORD, prompt_token_ids=(9,)))

    assert not admitted
    record = ledger.get("req-1")
    assert record is not None
    assert (record.prompt_token_ids, record.committed_position) == ((1, 49_151, 7), 3)


def test_an_unknown_request_has_no_record_and_no_state(ledger: RequestLedger) -> None:
    assert ledger.get("nobody") is None
    assert ledger.states(["nobody"]) == {}
    assert ledger.tokens("nobody") == []
    assert ledger.events("nobody") == []
    assert ledger.commit("nobody", 0, 1, [2]) == Unknown()
    assert ledger.finish("nobody", FinishReason.ABORT) is False
    assert ledger.advance_epoch("nobody", 0, 1) is None


def test_the_first_writer_of_a_position_wins(ledger: RequestLedger) -> None:
    first = ledger.commit("req-1", 4, 3, [11])
    second = ledger.commit("req-1", 4, 3, [99])

    assert (first, second) == (Committed(), AlreadyCommitted((11,), None))
    assert ledger.tokens("req-1") == [11]


def test_tokens_of_one_step_are_committed_together(ledger: RequestLedger) -> None:
    assert ledger.commit("req-1", 4, 3, [11, 12, 13]) == Committed()

    record = ledger.get("req-1")
    assert record is not None
    assert (record.committed_position, record.num_generated) == (5, 3)
    assert [
        (e.event_id, e.position, e.token_id)
        for e in ledger.events("req-1")
        if isinstance(e, TokenEvent)
    ] == [("3-0", 3, 11), ("4-0", 4, 12), ("5-0", 5, 13)]


def test_a_repeat_of_a_step_of_many_tokens_gets_all_that_won(ledger: RequestLedger) -> None:
    ledger.commit("req-1", 4, 3, [10])
    ledger.commit("req-1", 4, 4, [11, 12, 13])

    assert ledger.commit("req-1", 4, 4, [11]) == AlreadyCommitted((11, 12, 13), None)
    assert ledger.commit("req-1", 4, 4, [11, 12, 13, 14]) == AlreadyCommitted((11, 12, 13), None)
    assert ledger.commit("req-1", 4, 3, [10]) == Stale()
    assert ledger.commit("req-1", 4, 5, [12]) == Stale()  # no step begins there
    assert ledger.commit("req-1", 4, 6, [13]) == Stale()
    assert ledger.commit("req-1", 4, 8, [15]) == Gap(6)
    assert ledger.commit("req-1", 4, 7, [14]) == Committed()
    assert ledger.commit("req-1", 4, 4, [11, 12, 13]) == Stale()
    assert ledger.tokens("req-1") == [10, 11, 12, 13, 14]


def test_the_last_of_many_tokens_ends_the_request(ledger: RequestLedger) -> None:
    ledger.commit("req-1", 4, 3, [11, 12, 2], FinishReason.STOP)

    final = ledger.events("req-1")[-1]
    assert isinstance(final, FinalEvent)
    assert (final.event_id, final.num_generated) == ("5-1", 3)
    assert ledger.commit("req-1", 4, 3, [11, 12, 2], FinishReason.STOP) == AlreadyCommitted(
        (11, 12, 2), FinishReason.STOP
    )
    assert ledger.commit("req-1", 4, 6, [1]) == Finished(FinishReason.STOP)


def test_many_tokens_of_an_older_epoch_are_fenced_whole(ledger: RequestLedger) -> None:
    ledger.advance_epoch("req-1", 4, 5)

    assert ledger.commit("req-1", 4, 3, [1, 2, 3]) == Fenced(5)
    assert ledger.tokens("req-1") == []


def test_a_commit_is_judged_by_what_is_committed(ledger: RequestLedger) -> None:
    for position in (3, 4, 5):
        ledger.commit("req-1", 4, position, [position])

    assert ledger.commit("req-1", 4, 4, [9]) == Stale()
    assert ledger.commit("req-1", 4, 2, [9]) == Stale()
    assert ledger.commit("req-1", 4, 7, [9]) == Gap(5)
    assert ledger.commit("req-1", 3, 6, [9]) == Fenced(4)
    assert ledger.commit("req-1", 5, 6, [9]) == Fenced(4)
    assert ledger.tokens("req-1") == [3, 4, 5]


def test_the_last_prompt_position_is_stale_not_committed(ledger: RequestLedger) -> None:
    assert ledger.commit("req-1", 4, 2, [9]) == Stale()


def test_racing_commits_store_each_position_once(ledger: RequestLedger) -> None:
    def race(writer: int) -> int:
        results = [ledger.commit("req-1", 4, p, [1000 * writer + p]) for p in range(3, 23)]
        return sum(result == Committed() for result in results)

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(race, range(8)))

    assert sum(won) == 20
    events = ledger.events("req-1")
    assert [e.position for e in events if isinstance(e, TokenEvent)] == list(range(3, 23))


def test_results_of_an_older_epoch_are_fenced(ledger: RequestLedger) -> None:
    epoch = ledger.advance_epoch("req-1", 4, 5)

    assert epoch == 5
    assert ledger.commit("req-1", 4, 3, [1]) == Fenced(5)
    assert ledger.commit("req-1", 5, 3, [1]) == Committed()


def test_advancing_the_epoch_again_changes_nothing(ledger: RequestLedger) -> None:
    ledger.advance_epoch("req-1", 4, 5)

    assert ledger.advance_epoch("req-1", 4, 5) == 5
    assert ledger.advance_epoch("req-1", 4, 6) == 5


def test_a_finished_request_keeps_its_epoch(ledger: RequestLedger) -> None:
    ledger.finish("req-1", FinishReason.ABORT)

    assert ledger.advance_epoch("req-1", 4, 5) == 4


def test_the_last_token_and_the_end_come_together(ledger: RequestLedger) -> None:
    ledger.commit("req-1", 4, 3, [11])

    ledger.commit("req-1", 4, 4, [2], FinishReason.STOP)

    assert ledger.events("req-1") == [
        TokenEvent("3-0", 3, 11),
        TokenEvent("4-0", 4, 2),
        FinalEvent("4-1", FinishReason.STOP, "", 3, 2),
    ]
    assert ledger.commit("req-1", 4, 4, [2], FinishReason.STOP) == AlreadyCommitted(
        (2,), FinishReason.STOP
    )
    assert ledger.commit("req-1", 4, 5, [1]) == Finished(FinishReason.STOP)
    assert ledger.finish("req-1", FinishReason.ERROR, "late") is False


def test_a_request_that_fails_before_its_first_token_ends_with_its_error(
    ledger: RequestLedger,
) -> None:
    code = ErrorCode.NO_WORKERS
    assert ledger.finish("req-1", FinishReason.ERROR, "no worker serves group 2 é", code)

    assert ledger.events("req-1") == [
        FinalEvent("2-1", FinishReason.ERROR, "no worker serves group 2 é", 3, 0, error_code=code)
    ]
    record = ledger.get("req-1")
    assert record is not None
    assert record.error_code == code
    assert ledger.states(["req-1", "nobody"]) == {
        "req-1": RequestState(4, 2, FinishReason.ERROR, "no worker serves group 2 é")
    }


def test_a_request_of_one_prompt_token_can_end_at_once(ledger: RequestLedger) -> None:
    ledger.admit(dataclasses.replace(RECORD, request_id="one", prompt_token_ids=(5,)))

    ledger.finish("one", FinishReason.ABORT)

    assert ledger.events("one") == [FinalEvent("0-1", FinishReason.ABORT, "", 1, 0)]


def test_whatever_races_there_is_one_final_event(ledger: RequestLedger) -> None:
    def end(number: int) -> bool:
        if number % 2:
            return ledger.finish("req-1", FinishReason.ABORT, str(number))
        return ledger.commit("req-1", 4, 3, [7], FinishReason.STOP) == Committed()

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(end, range(24)))

    assert sum(won) == 1
    final = [e for e in ledger.events("req-1") if isinstance(e, FinalEvent)]
    assert len(final) == 1


def test_events_resume_after_the_last_one_seen(ledger: RequestLedger) -> None:
    for position in range(3, 10):
        ledger.commit("req-1", 4, position, [position])

    first = ledger.events("req-1", count=2)
    rest = ledger.events("req-1", after=first[-1].event_id)

    assert [e.event_id for e in first] == ["3-0", "4-0"]
    assert [e.event_id for e in rest] == ["5-0", "6-0", "7-0", "8-0", "9-0"]


def test_a_reader_is_woken_by_the_next_event(ledger: RequestLedger) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ledger.events, "req-1", block_ms=2_000)
        ledger.commit("req-1", 4, 3, [11])

        events = waiting.result(5)

    assert events == [TokenEvent("3-0", 3, 11)]


def test_a_reader_waits_no_longer_than_it_said(ledger: RequestLedger) -> None:
    started = time.monotonic()

    events = ledger.events("req-1", block_ms=50)

    assert events == []
    assert time.monotonic() - started < 2


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
def test_a_request_that_never_ran_ends_for_the_reason_it_is_given(
    ledger: RequestLedger, reason: FinishReason
) -> None:
    ended = dataclasses.replace(
        RECORD,
        request_id="req-2",
        prompt_token_ids=(),
        finish_reason=reason,
        error="why",
        error_code=ErrorCode.KV_MEMORY,
        error_param="max_tokens",
    )

    assert ledger.refuse(ended)
    assert not ledger.refuse(ended)
    assert not ledger.refuse(dataclasses.replace(ended, request_id="req-1")), "it runs"

    (event,) = ledger.events("req-2")
    assert isinstance(event, FinalEvent)
    assert (event.finish_reason, event.error, event.num_generated) == (reason, "why", 0)
    for told in (event, ledger.get("req-2")):
        assert told is not None
        assert (told.error_code, told.error_param) == ("kv_memory_exceeded", "max_tokens")
    assert ledger.states(["req-2"])["req-2"].finish_reason is reason
    assert not ledger.admit(dataclasses.replace(RECORD, request_id="req-2"))


@pytest.mark.parametrize("after", ["", "$", "5", "5-x", "-1-0", "٣-0"])
def test_a_malformed_event_id_is_a_request_error(ledger: RequestLedger, after: str) -> None:
    with pytest.raises(RequestError, match="event id must be"):
        ledger.events("req-1", after=after)


def test_all_keys_of_a_request_share_a_slot() -> None:
    names = [keys.ledger("r"), keys.events("r"), keys.kv_page("r", "even3", 1, 2)]

    assert {name[name.index("{") : name.index("}")] for name in names} == {"{r"}
    assert all(name.startswith("cellpipe:v1:") for name in names)


def test_the_ledger_tells_the_time_of_day(ledger: RequestLedger) -> None:
    before_ms = time.time_ns() // 1_000_000

    told_ms = ledger.now_unix_ms()

    assert before_ms <= told_ms <= time.time_ns() // 1_000_000
