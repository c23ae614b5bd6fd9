"""The ledger in this process: the same answers as the one in Redis, and no more memory than due."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.logprobs import TokenLogprobs
from shared.messages import FinishReason, SamplingParams
from shared.store import keys
from shared.store.connection import connect
from shared.store.ledger import Ledger
from shared.store.ledger_base import START, RequestLedger
from shared.store.ledger_types import Committed, Event, FinalEvent, LedgerRecord, TokenEvent
from shared.store.memory_ledger import SWEEP_EVERY_S, MemoryLedger

LATE = "late"
NAMES = ("a", "b")
RUNNING_TTL_S, FINISHED_TTL_S = 50_030.0, 5_030.0  # no multiple of the steps of the clock

names = st.sampled_from(NAMES)
epochs = st.integers(0, 2)
texts = st.sampled_from(["", "é", "x" * 2001])
reasons = st.sampled_from(FinishReason)
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3) | st.just([7] * 300)


@st.composite
def records(draw: st.DrawFn) -> LedgerRecord:
    prompt = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=2))
    return LedgerRecord(
        request_id=draw(names),
        model_id="m",
        layout_id="l",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=draw(st.sampled_from([0.0, 0.1])), seed=2**64 - 1),
        max_position=60,
        stop_token_ids=(0, 2),
        epoch=draw(epochs),
        created_unix_ms=5,
        deadline_unix_ms=draw(st.sampled_from([0, 9])),
        num_cached=draw(st.integers(0, 1)),
    )


def logprobs_of(name: str, token_ids: list[int]) -> list[TokenLogprobs]:
    """Those of tokens, if the request is the one that asked for them."""
    if name != NAMES[0]:
        return []
    return [TokenLogprobs.of(-float(i % 7), ((i, -0.5),) * (i % 3)) for i in token_ids]


class BothLedgers(RuleBasedStateMachine):
    """Each call goes to both. Time passes for both: in Redis by taking it off what keys have left.

    A reader remembers the last event that it saw of each request, as users do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.in_process = MemoryLedger(
            running_ttl_s=RUNNING_TTL_S, finished_ttl_s=FINISHED_TTL_S, clock=lambda: self.now_s
        )
        self.stores = connect("memory://")
        self.in_redis = Ledger(
            self.stores.meta, running_ttl_s=RUNNING_TTL_S, finished_ttl_s=FINISHED_TTL_S
        )
        self.seen = dict.fromkeys(NAMES, START)

    def teardown(self) -> None:
        self.stores.close()

    def same(self, call: Callable[[RequestLedger], Any]) -> Any:
        answer, expected = call(self.in_process), call(self.in_redis)
        assert answer == expected
        return answer

    @rule(record=records())
    def admit(self, record: LedgerRecord) -> None:
        self.same(lambda ledger: ledger.admit(record))

    @rule(record=records(), error=texts)
    def refuse(self, record: LedgerRecord, error: str) -> None:
        ended = replace(record, prompt_token_ids=(), finish_reason=FinishReason.ERROR, error=error)
        self.same(lambda ledger: ledger.refuse(ended))

    @rule(record=records(), error=texts)
    def bury(self, record: LedgerRecord, error: str) -> None:
        ended = replace(record, prompt_token_ids=(), finish_reason=FinishReason.ERROR, error=error)
        self.same(lambda ledger: ledger.bury(ended))

    @rule(name=names, epoch=epochs, position=st.integers(0, 8), token_ids=tokens)
    def commit(self, name: str, epoch: int, position: int, token_ids: list[int]) -> None:
        told = logprobs_of(name, token_ids)
        self.same(lambda ledger: ledger.commit(name, epoch, position, token_ids, None, told))

    @precondition(lambda self: any(map(self.in_process.get, NAMES)))
    @rule(name=names, token_ids=tokens, finish=st.none() | reasons, repeats=st.booleans())
    def commit_next(
        self, name: str, token_ids: list[int], finish: FinishReason | None, repeats: bool
    ) -> None:
        """What a worker would do, and perhaps another one who draws other tokens."""
        record = self.in_process.get(name)
        if record is None:
            return
        position = record.committed_position + 1
        epoch, told = record.epoch, logprobs_of(name, token_ids)
        self.same(lambda ledger: ledger.commit(name, epoch, position, token_ids, finish, told))
        if repeats:
            other = logprobs_of(name, [1, 2])
            self.same(lambda ledger: ledger.commit(name, epoch, position, [1, 2], None, other))

    @rule(name=names, reason=reasons, error=texts)
    def finish(self, name: str, reason: FinishReason, error: str) -> None:
        self.same(lambda ledger: ledger.finish(name, reason, error))

    @rule(name=names, num_cached=st.integers(0, 3))
    def note_cached(self, name: str, num_cached: int) -> None:
        self.same(lambda ledger: ledger.note_cached(name, num_cached))

    @rule(name=names, expected=epochs, new=epochs)
    def advance_epoch(self, name: str, expected: int, new: int) -> None:
        self.same(lambda ledger: ledger.advance_epoch(name, expected, new))

    @rule(name=names, count=st.integers(1, 3) | st.just(256))
    def read_on(self, name: str, count: int) -> None:
        after = self.seen[name]
        events = self.same(lambda ledger: without_time(ledger.events(name, after, count=count)))
        if events and events[-1].event_id != LATE:
            self.seen[name] = events[-1].event_id

    @rule(name=names, position=st.integers(0, 12), number=st.integers(0, 2))
    def read_from(self, name: str, position: int, number: int) -> None:
        self.same(lambda ledger: without_time(ledger.events(name, f"{position}-{number}")))

    @rule(position=st.integers(0, 12), number=st.integers(0, 2))
    def read_all_from(self, position: int, number: int) -> None:
        after = dict.fromkeys(NAMES, f"{position}-{number}")
        self.same(lambda ledger: {n: without_time(e) for n, e in ledger.events_of(after).items()})

    @rule(passed_s=st.sampled_from([100, 1_000, 4_000, 30_000]))
    def time_passes(self, passed_s: int) -> None:
        self.now_s += passed_s
        for name in NAMES:
            left_ms = self.stores.meta.run(("PTTL", keys.ledger(name))) - passed_s * 1000
            # The events of one that was driven again may end sooner in Redis, if it gives no token
            # for a day: here they end together.
            for key in (keys.ledger(name), keys.events(name)):
                self.stores.meta.run(("PEXPIRE", key, left_ms))

    @invariant()
    def both_know_the_same(self) -> None:
        self.same(lambda ledger: ledger.states(NAMES))
        self.same(lambda ledger: [ledger.get(name) for name in NAMES])
        self.same(lambda ledger: [ledger.tokens(name) for name in NAMES])
        self.same(lambda ledger: [without_time(ledger.events(n, count=1000)) for n in NAMES])


def without_time(events: list[Event]) -> list[Event]:
    """Without ids that are the time, of which two ledgers have different ones."""
    return [
        replace(event, event_id=LATE) if int(event.event_id.partition("-")[0]) > 1e12 else event
        for event in events
    ]


TestBothLedgers = BothLedgers.TestCase
TestBothLedgers.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def record_of(name: str) -> LedgerRecord:
    return LedgerRecord(
        request_id=name,
        model_id="m",
        layout_id="l",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(seed=1),
        max_position=60,
    )


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_ended_requests_take_no_room_once_their_time_is_over() -> None:
    clock = Clock()
    ledger = MemoryLedger(finished_ttl_s=600.0, clock=clock)

    most = 0
    for number in range(5_000):
        name = f"r{number}"
        ledger.admit(record_of(name))
        ledger.commit(name, 0, 2, [5], FinishReason.STOP)
        most = max(most, len(ledger))
        clock.now_s += 1.0

    # those that ended within their time, and within one round of sweeping
    assert most <= 600 + SWEEP_EVERY_S + 1
    assert ledger.tokens("r4990") == [5]
    assert ledger.get("r4000") is None


def test_a_request_that_runs_is_kept_as_long_as_it_gives_tokens() -> None:
    clock = Clock()
    ledger = MemoryLedger(running_ttl_s=100.0, clock=clock)
    ledger.admit(record_of("silent"))
    ledger.admit(record_of("lively"))

    for position in range(2, 602):
        clock.now_s += 0.3
        assert ledger.commit("lively", 0, position, [position]) == Committed()
    ledger.admit(record_of("last"))

    assert len(ledger) == 2
    assert ledger.get("silent") is None
    assert len(ledger.tokens("lively")) == 600


def test_a_reader_may_wait_before_the_request_is_known_and_leaves_nothing_behind() -> None:
    ledger = MemoryLedger()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ledger.events, "r", START, 10_000) for _ in range(2)]
        ledger.admit(record_of("r"))
        ledger.admit(record_of("other"))
        ledger.commit("other", 0, 2, [9])
        ledger.commit("r", 0, 2, [5])

        events = [reader.result(5) for reader in waiting]

    assert events == [[TokenEvent("2-0", 2, 5)]] * 2
    assert ledger.events("nobody", START, 20) == []
    assert ledger.num_readers == 0


@pytest.mark.parametrize("end", ["finish", "refuse", "bury"])
def test_a_reader_is_woken_by_the_end(end: str) -> None:
    ledger = MemoryLedger()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ledger.events, "r", START, 10_000)
        if end == "finish":
            ledger.admit(record_of("r"))
            ledger.finish("r", FinishReason.ABORT)
        else:
            getattr(ledger, end)(replace(record_of("r"), finish_reason=FinishReason.ERROR))

        (event,) = waiting.result(5)

    assert isinstance(event, FinalEvent)
