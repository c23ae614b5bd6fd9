"""A store that does not answer for a while makes an answer pause, and loses none of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.cli.answer import ask
from services.cli.session import Session, _SchedulerWatch
from shared.api.model import ApiModel
from shared.errors import RequestError, StoreUnavailable, TransientError
from shared.messages import FinishReason, Request, SamplingParams
from shared.outage import OUTAGE_PATIENCE_S, wait_out
from shared.producer import Producer
from shared.store.connection import Connection
from shared.store.ledger import Ledger
from shared.store.ledger_base import START
from shared.store.ledger_types import Event
from shared.store.presence import Presence
from tests.rig import FakeClock, Rig
from tests.rig_model import GREEDY, expected_tokens, prompt_of, rig_tokenizer

LOADING = "Redis at here:1: it is still loading its data (LOADING)"


class FailingLedger(Ledger):
    """Gives one event a read, and fails on the reads (counted from 0) and cancels that it is told
    to. Before each read it calls `before_read`."""

    def __init__(
        self,
        meta: Connection,
        failing: Callable[[int], bool],
        before_read: Callable[[int], None] = lambda _: None,
        num_failing_cancels: int = 0,
    ) -> None:
        super().__init__(meta)
        self._failing = failing
        self._before_read = before_read
        self.num_reads = 0
        self.num_failing_cancels = num_failing_cancels

    def events(
        self, request_id: str, after: str = START, block_ms: int = 0, count: int = 256
    ) -> list[Event]:
        number = self.num_reads
        self.num_reads += 1
        self._before_read(number)
        if self._failing(number):
            raise StoreUnavailable(LOADING)
        return super().events(request_id, after, block_ms=block_ms, count=1)

    def finish(
        self,
        request_id: str,
        finish_reason: FinishReason,
        *args: object,
        **others: object,
    ) -> bool:
        if self.num_failing_cancels:
            self.num_failing_cancels -= 1
            raise StoreUnavailable(LOADING)
        return super().finish(request_id, finish_reason, *args, **others)  # type: ignore[arg-type]


def answered_rig() -> Rig:
    """A pipeline that has answered request "r"."""
    rig = Rig(1)
    rig.add_worker(0)
    rig.add_scheduler()
    rig.submit(Request("r", token_ids=prompt_of(5), sampling=GREEDY))
    rig.run_until_quiet()
    return rig


def whole_text() -> str:
    return rig_tokenizer().decode(expected_tokens(prompt_of(5), GREEDY), skip_special=True)


def session_of(rig: Rig, ledger: Ledger, *, patience_s: float = 30.0) -> Session:
    producer = Producer(rig.new_broker(), ledger, tokenizer=rig_tokenizer(), patience_s=patience_s)
    model = ApiModel(
        tokenizer=rig_tokenizer(),
        chat_template=None,
        model_id=rig.layout.model_id,
        vocab_size=rig.config.vocab_size,
        max_positions=rig.config.max_position_embeddings,
    )
    return Session(producer, model, check=lambda: None, outlives_us=True)


def test_a_store_that_comes_back_in_time_is_waited_for() -> None:
    clock = FakeClock()
    started_s = clock()
    outages: list[str] = []

    def work() -> str:
        if clock() - started_s < 0.9 * OUTAGE_PATIENCE_S:
            raise StoreUnavailable("away")
        return "here"

    found = wait_out(
        work, on_outage=lambda e: outages.append(str(e)), clock=clock, sleep=clock.sleep
    )

    assert found == "here"
    assert outages == ["away"]


def test_the_wait_for_a_store_has_an_end() -> None:
    clock = FakeClock()
    started_s = clock()

    def work() -> None:
        raise StoreUnavailable("away")

    with pytest.raises(StoreUnavailable, match="away"):
        wait_out(work, clock=clock, sleep=clock.sleep)

    assert OUTAGE_PATIENCE_S / 2 < clock() - started_s <= OUTAGE_PATIENCE_S


def test_what_is_wrong_for_good_is_not_waited_for() -> None:
    def work() -> None:
        raise RequestError("malformed")

    with pytest.raises(RequestError):
        wait_out(work, sleep=lambda _: pytest.fail("it waited"))


def test_a_stream_and_a_result_go_on_where_they_were_after_outages() -> None:
    rig = answered_rig()

    def producer() -> Producer:
        ledger = FailingLedger(rig.stores.meta, lambda number: number in (0, 1, 4, 7, 8))
        return Producer(rig.new_broker(), ledger, tokenizer=rig_tokenizer())

    outages: list[str] = []
    text = "".join(producer().stream("r", on_outage=lambda e: outages.append(str(e))))

    assert text == whole_text()
    assert outages == [LOADING] * 3
    assert producer().result("r").text == text


def test_a_stream_that_gives_up_names_its_request() -> None:
    rig = answered_rig()
    ledger = FailingLedger(rig.stores.meta, lambda number: number >= 2)
    producer = Producer(rig.new_broker(), ledger, tokenizer=rig_tokenizer(), patience_s=0.0)

    with pytest.raises(StoreUnavailable, match=r"request r cannot be read: .*LOADING"):
        list(producer.stream("r"))
    with pytest.raises(StoreUnavailable, match=r"request r cannot be read"):
        producer.result("r")


def test_a_result_that_is_not_waited_for_fails_at_once() -> None:
    ledger = FailingLedger(answered_rig().stores.meta, lambda _: True)
    producer = Producer(Rig(1).new_broker(), ledger, tokenizer=rig_tokenizer())

    with pytest.raises(StoreUnavailable):
        producer.result("r", timeout_s=0)

    assert ledger.num_reads == 1


def test_an_answer_that_is_shown_pauses_and_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    rig = answered_rig()
    capsys.readouterr()  # the logs of that
    ledger = FailingLedger(rig.stores.meta, lambda number: number in (3, 4))
    again = Request("r", token_ids=prompt_of(5), sampling=GREEDY)

    answer = ask(session_of(rig, ledger), again, echo=True)

    shown = capsys.readouterr()
    assert answer.text == whole_text()
    assert answer.token_ids == expected_tokens(prompt_of(5), GREEDY)
    assert shown.out == whole_text() + "\n"
    assert "cellpipe: Redis does not answer; waiting\n" in shown.err


def test_an_error_after_text_begins_a_line_and_says_how_to_read_the_rest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rig = answered_rig()
    capsys.readouterr()  # the logs of that
    ledger = FailingLedger(rig.stores.meta, lambda number: number >= 3)
    again = Request("r", token_ids=prompt_of(5), sampling=GREEDY)

    with pytest.raises(TransientError, match="request r ") as caught:
        ask(session_of(rig, ledger, patience_s=0.0), again, echo=True)

    shown = capsys.readouterr().out
    assert shown.endswith("\n")
    assert whole_text().startswith(shown.removesuffix("\n"))
    assert shown != "\n"
    assert "cellpipe result r --follow" in caught.value.remedy
    assert "cellpipe cancel r --queued" in caught.value.remedy


def test_a_stop_by_ctrl_c_waits_for_the_store_too() -> None:
    rig = Rig(1)

    def press(number: int) -> None:
        if number == 0:
            raise KeyboardInterrupt

    ledger = FailingLedger(rig.stores.meta, lambda _: False, press, num_failing_cancels=2)
    request = Request("r", token_ids=prompt_of(5), sampling=SamplingParams(max_tokens=4))

    answer = ask(session_of(rig, ledger), request, echo=False)

    assert answer.finish_reason is FinishReason.ABORT
    assert ledger.num_failing_cancels == 0


def test_while_the_store_is_away_schedulers_are_not_missed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class AwayPresence(Presence):
        def schedulers(self) -> list[object]:  # type: ignore[override]
            raise StoreUnavailable(LOADING)

    watch = _SchedulerWatch(AwayPresence(Rig(1).stores.meta))
    monkeypatch.setattr("services.cli.session.NO_SCHEDULER_GRACE_S", 0.0)

    watch.check()
    watch.check()
    with pytest.raises(TransientError, match="no scheduler runs"):
        _SchedulerWatch(Presence(Rig(1).stores.meta)).check()
