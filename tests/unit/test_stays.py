"""Steps that stay in their worker: few messages, the same tokens, and nothing is left behind."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.admission import first_step
from services.worker.batch import Pending, Slice
from services.worker.limits import WorkerLimits
from services.worker.stays import Stays
from services.worker.worker import Worker
from shared import codec
from shared.broker.base import Delivery, Outgoing
from shared.errors import StoreUnavailable
from shared.messages import FinishReason, Request, SamplingParams, Step
from shared.model.layer_group import SequenceSlice
from shared.store.kv_pages import PAGE_ROWS
from shared.store.leftovers import leftover_keys
from shared.topology import REQUESTS_QUEUE
from tests.faults import Crash, LosableBroker, LossyBroker, Tripwire, Weather
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, prompt_of

PROMPT = prompt_of(30)
NUM_TOKENS = 26  # over the ends of pages
LONG = replace(SAMPLED, max_tokens=NUM_TOKENS)
SHAPED = replace(LONG, frequency_penalty=0.3, repetition_penalty=1.1, logprobs=1)
GUESSED = replace(GREEDY, max_tokens=NUM_TOKENS, speculation=True)
ASKED = [
    ("a", PROMPT, LONG),
    ("b", prompt_of(5, salt=1), replace(GREEDY, max_tokens=NUM_TOKENS)),
    ("c", prompt_of(17, salt=2), SHAPED),
]
NUM_ASKED = sum(sampling.max_tokens for _, _, sampling in ASKED)
# Where a worker of the only group may die: in which part, at which call.
CALLS = [
    ("kv_pages", "start_writes"),
    ("ledger", "start_commits"),
    ("broker", "publish"),
    ("broker", "ack"),
]

Asked = Sequence[tuple[str, Sequence[int], SamplingParams]]


def start(rig: Rig, asked: Asked = ASKED) -> None:
    for request_id, prompt, sampling in asked:
        rig.start(request_id, prompt, sampling)


def finish(rig: Rig, asked: Asked = ASKED) -> None:
    rig.run_until_done(*(request_id for request_id, _, _ in asked))
    rig.run_until_quiet()
    assert_answers(rig, asked)
    assert rig.num_dead() == 0
    for actor in rig.actors:
        if isinstance(actor, Worker):
            assert actor.num_pending == actor.num_waiting == 0


def num_tokens(rig: Rig) -> int:
    return sum(len(rig.tokens(request_id)) for request_id, _, _ in ASKED)


def run_until_amid(rig: Rig, request_id: str = "a") -> None:
    """Until a request is in the middle of a page, some of whose steps stayed."""
    rig.run_until(lambda: len(rig.tokens(request_id)) == 9)


class Counted:
    """A worker of all groups whose published steps and computed rows are counted."""

    def __init__(self, rig: Rig, *groups: int, **parts: Any) -> None:
        self.wire = LosableBroker(rig.hub)
        self.line = LossyBroker(self.wire)
        self.worker = rig.add_worker(*(groups or (0,)), broker=self.line, **parts)

    @property
    def num_steps(self) -> int:
        return len(self.line.seen)


# the choice


def a_slice(**changes: Any) -> Slice:
    values = {"request_id": "r", "position": 20, "route": ("me",), "num_rows": 1}
    values |= {k: v for k, v in changes.items() if k in values}
    step = Step(
        request_id=values["request_id"],
        model_id="m",
        layout_id="l",
        group=0,
        epoch=0,
        position=values["position"],
        sample=True,
        max_position=99,
        tensors={"token_ids": np.arange(values["num_rows"], dtype=np.int32)},
        sampling=GREEDY,
        route=values["route"],
    )
    delivery = Delivery(changes.get("queue", "q"), b"", False, "", "", "", None)
    pending = {k: v for k, v in changes.items() if k in ("is_suspect", "early_since_s", "stays")}
    return Slice(
        Pending(delivery, step, **pending),
        changes.get("start", 0),
        changes.get("take", values["num_rows"] - changes.get("start", 0)),
    )


def choose(
    *pieces: Slice, worker_id: str = "me", staying: int = 0, room: int = 2, **more: Any
) -> list[bool]:
    stays = Stays(
        {0, 1},
        worker_id=worker_id,
        is_alone=more.get("is_alone", False),
        num_staying=lambda: Counter({"q": staying}),
        room=lambda _: room,
    )
    stays.is_leaving = more.get("is_leaving", False)
    stays.begin()
    return [stays.may(p, replace(p.pending.step, group=more.get("group", 0))) for p in pieces]


def test_a_step_for_its_own_worker_stays_while_there_is_room() -> None:
    assert choose(a_slice(), a_slice(), a_slice()) == [True, True, False]
    assert choose(a_slice(), a_slice(), staying=1) == [True, False]


def test_one_that_stayed_needs_no_room() -> None:
    assert choose(a_slice(stays=True), a_slice(), staying=2) == [True, False]


def test_each_queue_has_its_own_room() -> None:
    assert choose(a_slice(), a_slice(queue="other"), staying=1, room=1) == [False, True]


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({"is_suspect": True}, {}),
        ({"early_since_s": 1.0}, {}),
        ({"num_rows": 4, "start": 2}, {}),
        ({"num_rows": 4, "take": 2}, {}),
        ({"route": ("another",)}, {}),
        ({"route": ()}, {}),
        ({}, {"group": 2}),
        ({}, {"is_leaving": True}),
        ({}, {"room": 0}),
        ({}, {"worker_id": ""}),
    ],
)
def test_what_may_not_stay_travels(changes: dict[str, Any], more: dict[str, Any]) -> None:
    assert choose(a_slice(**changes), **more) == [False]


def test_without_an_id_all_stays_with_who_is_alone() -> None:
    assert choose(a_slice(route=()), worker_id="", is_alone=True) == [True]


# few messages


@pytest.mark.parametrize("embedded", [False, True])
def test_one_message_a_page_passes_through_the_broker(embedded: bool) -> None:
    rig = Rig(1, embedded=embedded)
    counted = Counted(rig)

    start(rig)
    finish(rig)

    most = sum(2 + (len(p) + s.max_tokens) // PAGE_ROWS for _, p, s in ASKED)
    assert counted.num_steps <= most
    assert num_tokens(rig) == NUM_ASKED


@pytest.mark.parametrize("num_requests", [16, 40])
def test_as_many_stay_as_there_is_room_for_however_they_come(num_requests: int) -> None:
    limits = WorkerLimits(max_batch_rows=1_000, token_prefetch=32)
    rig = Rig(1, limits=limits)
    counted = Counted(rig)
    # their first messages are those of the end of a page: then all follow at once
    asked = [(f"r{n}", prompt_of(17, salt=n), SAMPLED) for n in range(num_requests)]

    start(rig, asked)
    rig.run_until(lambda: all(rig.tokens(request_id) for request_id, _, _ in asked))
    rig.turn()
    num_before = counted.num_steps
    for _ in range(5):
        rig.turn()

    assert counted.num_steps - num_before == 5 * min(num_requests - 16, 16)  # the rest of the room
    finish(rig, asked)


def test_who_travels_beside_many_that_stay_has_its_turns() -> None:
    rig = Rig(1, limits=WorkerLimits(prefetch=4, token_prefetch=4))
    Counted(rig)
    asked = [(f"r{n}", prompt_of(5, salt=n), replace(SAMPLED, max_tokens=60)) for n in range(12)]

    start(rig, asked)
    for _ in range(60):
        rig.turn()

    # then nobody waits for the end of others
    assert min(len(rig.tokens(request_id)) for request_id, _, _ in asked) >= 10
    finish(rig, asked)


# deaths


@pytest.mark.parametrize("has_scheduler", [True, False])
@pytest.mark.parametrize("nth", [1, 3, 15])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("part", "method"), CALLS)
def test_a_worker_that_dies_anywhere_in_its_turn_changes_no_token(
    part: str, method: str, after: bool, nth: int, has_scheduler: bool
) -> None:
    rig = Rig(1)
    inner = {"kv_pages": rig.kv_pages, "ledger": rig.ledger, "broker": LosableBroker(rig.hub)}
    only_if = is_step if method == "publish" else always
    wire = Tripwire(inner[part], method, Crash, after=after, nth=nth, only_if=only_if)
    rig.add_worker(0, **{part: wire})
    if has_scheduler:
        rig.add_scheduler()

    start(rig)
    for _ in range(200):
        rig.turn()
        if rig.num_crashes:
            break
    rig.add_worker(0)
    finish(rig)

    assert rig.num_crashes == (1 if wire.has_fired else 0)


def is_step(messages: Sequence[Outgoing]) -> bool:
    return any(isinstance(codec.decode(message.body), Step) for message in messages)


def always(*_: Any) -> bool:
    return True


@pytest.mark.parametrize("moment", range(1, NUM_TOKENS, 3))
def test_of_a_worker_that_dies_a_page_of_rows_is_computed_again(moment: int) -> None:
    rig = Rig(1)
    first = rig.add_worker(0)
    start(rig, ASKED[:1])
    rig.run_until(lambda: len(rig.tokens("a")) == moment)
    rig.kill(first)

    heir = Counted(rig)
    rows: list[int] = []
    note_rows(heir.worker, rows)
    finish(rig, ASKED[:1])

    assert sum(rows) <= LONG.max_tokens - moment + PAGE_ROWS + 1


def note_rows(worker: Worker, rows: list[int]) -> None:
    """Note how many rows each turn computes."""
    worker._layer_groups[0] = NotingGroup(worker._layer_groups[0], rows)  # type: ignore[assignment]


class NotingGroup:
    def __init__(self, inner: Any, rows: list[int]) -> None:
        self._inner = inner
        self._rows = rows

    def forward(self, hidden: Any, sequences: Any) -> Any:
        self._rows.append(len(hidden))
        return self._inner.forward(hidden, sequences)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("moment", range(1, 12, 2))
def test_a_lost_connection_amid_a_page_changes_nothing(moment: int) -> None:
    rig = Rig(1)
    counted = Counted(rig)
    start(rig)
    rig.run_until(lambda: len(rig.tokens("a")) == moment)

    counted.wire.lose()
    num_before, left = counted.num_steps, NUM_ASKED - num_tokens(rig)
    finish(rig)

    # then what came again stands for what went on: hardly a step travels for it
    assert counted.num_steps - num_before <= 3 + left // PAGE_ROWS + 3


@pytest.mark.parametrize("moment", range(1, 12, 2))
def test_a_lost_connection_may_hand_the_step_to_another_worker(moment: int) -> None:
    rig = Rig(1)
    counted = Counted(rig)
    start(rig)
    rig.run_until(lambda: len(rig.tokens("a")) == moment)
    other = Counted(rig)

    counted.wire.lose()
    finish(rig)

    assert counted.num_steps + other.num_steps < 40


# ends, leaves and losses


def test_a_drain_amid_a_page_sends_what_follows_on() -> None:
    rig = Rig(1)
    counted = Counted(rig)
    start(rig)
    run_until_amid(rig)

    counted.worker.stop_consuming()
    for _ in range(3):
        counted.worker.turn(0.0)

    assert counted.worker.num_pending == 0
    assert rig.num_steps() == 3
    rig.kill(counted.worker)
    heir = rig.add_worker(0)
    rows: list[int] = []
    note_rows(heir, rows)
    left = NUM_ASKED - num_tokens(rig)
    finish(rig)
    assert sum(rows) == left  # not one twice


@pytest.mark.parametrize("resumes", [True, False])
def test_what_is_handed_back_amid_a_page_goes_on_at_the_same_worker_or_another(
    resumes: bool,
) -> None:
    rig = Rig(1)
    counted = Counted(rig)
    start(rig)
    run_until_amid(rig)

    counted.worker.hand_back_all()
    assert counted.worker.num_pending == 0
    assert rig.num_steps() == 3
    if resumes:
        counted.worker.resume()
    else:
        rig.add_worker(0)
    finish(rig)


def test_a_group_that_is_dropped_amid_a_page_is_served_by_another() -> None:
    rig = Rig(1)
    counted = Counted(rig)
    start(rig)
    run_until_amid(rig)

    counted.worker.drop_group(0)

    assert counted.worker.num_pending == 0
    rig.add_worker(0)
    finish(rig)


@pytest.mark.parametrize("ends", ["cancel", "deadline"])
def test_a_request_that_ends_amid_a_page_leaves_nothing(ends: str) -> None:
    rig = Rig(1)
    counted = Counted(rig)
    rig.add_scheduler()
    deadline = rig.ledger.now_unix_ms() + 60_000
    for request_id, prompt, sampling in ASKED:
        rig.submit(
            Request(request_id, token_ids=prompt, sampling=sampling, deadline_unix_ms=deadline)
        )
    run_until_amid(rig)

    if ends == "cancel":
        rig.ledger.finish("a", FinishReason.ABORT)
    else:
        item = next(i for i in counted.worker._inbox if i.step.request_id == "a")
        item.step = replace(item.step, deadline_unix_ms=1)
    rig.run_until_done("a", "b", "c")
    rig.run_until_quiet()
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)

    assert len(rig.tokens("a")) in (9, 10)
    assert_answers(rig, ASKED[1:])
    assert counted.worker.num_pending == 0
    assert leftover_keys(rig.stores, "abc") == []


@pytest.mark.parametrize("kv_cache_bytes", [0, 20_000, 80_000])
@pytest.mark.parametrize("has_scheduler", [True, False])
def test_little_memory_only_delays(kv_cache_bytes: int, has_scheduler: bool) -> None:
    rig = Rig(1, limits=WorkerLimits(kv_cache_bytes=kv_cache_bytes, max_batch_rows=12))
    rig.add_worker(0)
    if has_scheduler:
        rig.add_scheduler()
    asked = [*ASKED, *((f"r{n}", prompt_of(9, salt=n), LONG) for n in range(6))]

    start(rig, asked)
    finish(rig, asked)


@pytest.mark.parametrize("moment", range(2, NUM_TOKENS, 3))
def test_rows_that_are_evicted_before_they_are_stored_are_computed_again(moment: int) -> None:
    rig = Rig(1)
    counted = Counted(rig)
    start(rig)
    rig.run_until(lambda: len(rig.tokens("a")) == moment)

    counted.worker._pool.drop_group(0)
    finish(rig)


@pytest.mark.parametrize("speculation", [True, False])
@pytest.mark.parametrize("embedded", [True, False])
def test_shaped_and_guessed_tokens_stay_the_same(embedded: bool, speculation: bool) -> None:
    rig = Rig(1, embedded=embedded)
    counted = Counted(rig)
    asked = [
        ("looping", prompt_of(7) * 4, replace(GUESSED, speculation=speculation)),
        ("shaped", prompt_of(6, salt=3) * 2, replace(SHAPED, speculation=speculation)),
        ("sampled", prompt_of(5, salt=3) * 5, replace(LONG, speculation=speculation)),
    ]

    start(rig, asked)
    finish(rig, asked)

    assert counted.num_steps <= 15


@pytest.mark.parametrize("moment", range(2, NUM_TOKENS, 5))
def test_guessed_tokens_of_a_worker_that_dies_are_driven_again(moment: int) -> None:
    rig = Rig(1)
    first = rig.add_worker(0)
    rig.add_scheduler()
    asked = [
        ("looping", prompt_of(7) * 4, GUESSED),
        ("sampled", prompt_of(5, salt=3) * 5, replace(LONG, speculation=True)),
    ]
    for request_id, prompt, sampling in asked:
        rig.submit(Request(request_id, token_ids=prompt, sampling=sampling))
    rig.run_until(lambda: has_tokens(rig, "looping", moment))
    rig.kill(first)
    rig.add_worker(0)

    finish(rig, asked)
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)
    assert leftover_keys(rig.stores, [request_id for request_id, _, _ in asked]) == []


def has_tokens(rig: Rig, request_id: str, count: int) -> bool:
    return rig.ledger.get(request_id) is not None and len(rig.tokens(request_id)) >= count


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize(
    ("part", "method"),
    [("ledger", "start_commits"), ("kv_pages", "start_writes"), ("broker", "publish")],
)
def test_a_call_that_fails_amid_a_page_only_delays(
    part: str, method: str, times: int, after: bool
) -> None:
    rig = Rig(1)
    inner = {"kv_pages": rig.kv_pages, "ledger": rig.ledger, "broker": LosableBroker(rig.hub)}
    error = StoreUnavailable("gone for a moment")
    wire = Tripwire(inner[part], method, error, after=after, nth=5, times=times)
    rig.add_worker(0, **{part: wire})

    start(rig)
    finish(rig)

    assert wire.has_fired


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize(("part", "method"), [("ledger", "events"), ("kv_pages", "read")])
def test_what_fails_while_a_page_is_begun_again_only_delays(
    part: str, method: str, times: int
) -> None:
    # given steps that stayed and whose rows are gone
    rig = Rig(1)
    inner: dict[str, Any] = {"kv_pages": rig.kv_pages, "ledger": rig.ledger}
    wire = Tripwire(inner[part], method, StoreUnavailable("gone for a moment"), times=times)
    counted = Counted(rig, **{part: wire})
    start(rig)
    run_until_amid(rig)
    counted.worker._pool.drop_group(0)

    finish(rig)

    assert wire.num_calls > times


@pytest.mark.parametrize("moment", range(2, NUM_TOKENS, 3))
def test_rows_that_the_store_lost_amid_a_page_are_written_again(moment: int) -> None:
    rig = Rig(1)
    rig.add_worker(0)
    start(rig)
    rig.run_until(lambda: len(rig.tokens("a")) == moment)

    if found := rig.stores.kv.run(("KEYS", "*:kv:*")):
        rig.stores.kv.run(("DEL", *found))
    finish(rig)


def test_full_pages_are_in_the_store_at_the_end() -> None:
    rig = Rig(1)
    rig.add_worker(0)

    start(rig)
    finish(rig)

    for request_id, prompt, sampling in ASKED:
        num_rows = len(prompt) + sampling.max_tokens - 1
        assert rig.num_kv_rows(request_id)[0] >= num_rows // PAGE_ROWS * PAGE_ROWS


# workers of several groups


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("nth", [4, 9, 12])
@pytest.mark.parametrize(
    ("part", "method"),
    [("ledger", "start_commits"), ("kv_pages", "start_writes"), ("broker", "publish")],
)
def test_a_call_that_fails_where_one_serves_all_groups_only_delays(
    part: str, method: str, nth: int, after: bool
) -> None:
    rig = Rig(2)
    inner = {"kv_pages": rig.kv_pages, "ledger": rig.ledger, "broker": LosableBroker(rig.hub)}
    error = StoreUnavailable("gone for a moment")
    rig.add_worker(0, 1, **{part: Tripwire(inner[part], method, error, after=after, nth=nth)})

    start(rig)
    finish(rig)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_what_one_of_all_groups_hands_back_goes_on_with_one_worker_a_group(num_turns: int) -> None:
    rig = Rig(2)
    counted = Counted(rig, 0, 1)
    start(rig)
    run_until_amid(rig)
    for _ in range(num_turns):
        rig.turn()

    counted.worker.hand_back_all()
    rig.kill(counted.worker)
    rig.add_workers()
    finish(rig)


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("num_turns", [0, 1])
def test_a_group_dropped_amid_a_page_goes_on_at_another(num_turns: int, group: int) -> None:
    rig = Rig(2)
    counted = Counted(rig, 0, 1)
    start(rig)
    run_until_amid(rig)
    for _ in range(num_turns):
        rig.turn()

    rig.peers[counted.worker.worker_id] = replace(
        rig.peers[counted.worker.worker_id], groups=(1 - group,)
    )
    counted.worker.drop_group(group)
    rig.add_worker(group)
    finish(rig)


@pytest.mark.parametrize("num_turns", [0, 1, 2, 3])
def test_one_of_all_groups_that_dies_has_its_requests_driven_again(num_turns: int) -> None:
    rig = Rig(2)
    victim = rig.add_worker(0, 1)
    scheduler = rig.add_scheduler()
    for request_id, prompt, sampling in ASKED:
        rig.submit(Request(request_id, token_ids=prompt, sampling=sampling))
    rig.run_until(lambda: has_tokens(rig, "a", 9))
    for _ in range(num_turns):
        rig.turn()

    rig.kill(victim)
    rig.add_workers()
    finish(rig)

    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)
    assert scheduler.num_redrives <= len(ASKED)
    assert leftover_keys(rig.stores, "abc") == []


@pytest.mark.parametrize("num_turns", [0, 1])
@pytest.mark.parametrize("moment", range(1, 12, 3))
def test_a_lost_connection_of_one_of_all_groups_changes_nothing(
    moment: int, num_turns: int
) -> None:
    rig = Rig(2)
    counted = Counted(rig, 0, 1)
    start(rig)
    rig.run_until(lambda: len(rig.tokens("a")) >= moment)
    for _ in range(num_turns):
        rig.turn()
    num_before, num_done = counted.num_steps, counted.worker.num_steps_done
    left = NUM_ASKED - num_tokens(rig)

    counted.wire.lose()
    finish(rig)

    # then what came again was not computed again, whichever group was at it
    assert counted.num_steps - num_before <= 3 + left // PAGE_ROWS
    assert counted.worker.num_steps_done - num_done <= 2 * left


# late copies


@pytest.mark.parametrize("epoch", [0, 5, 9], ids=["older", "same", "newer"])
@pytest.mark.parametrize("came_before", [False, True])
@pytest.mark.parametrize("num_behind", [0, 7])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_late_copy_dies_out(
    num_groups: int, num_workers: int, num_behind: int, came_before: bool, epoch: int
) -> None:
    # given a request amid a page, and a step before that of its newest token
    rig = Rig(num_groups)
    workers = [rig.add_worker(*range(num_groups)) for _ in range(num_workers)]
    plan = rig.admit("a", PROMPT, LONG)
    rig.ledger.advance_epoch("a", 0, 5)
    rig.publish_step(first_step(plan, rig.layout, epoch=5))
    rig.run_until(lambda: len(rig.tokens("a")) == 12)
    number = 11 - num_behind
    old = feed(rig, rig.tokens("a")[number], len(PROMPT) + number, epoch)
    num_before = sum(worker.num_steps_done for worker in workers)

    rig.publish_step(old)
    if came_before:
        rig.redeliver(rig.queue(0))
    finish(rig, ASKED[:1])

    num_done = sum(worker.num_steps_done for worker in workers) - num_before
    assert num_done <= num_groups * (LONG.max_tokens - 12) + 4


def feed(rig: Rig, token: int, position: int, epoch: int) -> Step:
    """The decode step of a token of the request "a"."""
    return Step(
        request_id="a",
        model_id=rig.layout.model_id,
        layout_id=rig.layout.layout_id,
        group=0,
        epoch=epoch,
        position=position,
        sample=True,
        max_position=len(PROMPT) + LONG.max_tokens - 1,
        tensors={"token_ids": np.array([token], np.int32)},
        sampling=LONG,
        stop_token_ids=rig.config.eos_token_ids,
    )


@pytest.mark.parametrize("num_turns", [0, 3, 30])
def test_a_frozen_worker_finds_its_steps_done_by_another(num_turns: int) -> None:
    # given a worker that freezes amid a page and loses its connection for that
    rig = Rig(1)
    counted = Counted(rig)
    start(rig)
    run_until_amid(rig)
    frozen = rig.freeze(counted.worker)
    other = Counted(rig)
    counted.wire.lose()
    for _ in range(num_turns):
        rig.turn()

    rig.thaw(frozen)
    finish(rig)

    assert counted.num_steps + other.num_steps < 40


def test_a_copy_that_waits_beside_its_twin_leaves_no_second_chain() -> None:
    rig = Rig(1)
    counted = Counted(rig)
    step = rig.start("a", PROMPT, LONG)
    for _ in range(3):
        rig.publish_step(step)

    most = 0
    while not rig.record("a").finish_reason:
        rig.turn()
        most = max(most, len(counted.worker._inbox))
    finish(rig, ASKED[:1])

    assert most <= 4
    assert counted.worker.num_steps_done <= LONG.max_tokens + 8


# poison


class Poisoned:
    """A layer group that ends its process whenever it computes one position of one request."""

    def __init__(self, inner: Any, position: int, caches: Callable[[], Container[int]]) -> None:
        self._inner = inner
        self._position = position
        self._caches = caches

    def forward(self, hidden: Any, sequences: Sequence[SequenceSlice]) -> Any:
        for part in sequences:
            rows = range(part.start_position, part.start_position + part.num_rows)
            if self._position in rows and id(part.cache) in self._caches():
                raise Crash
        return self._inner.forward(hidden, sequences)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("number", [1, 4, 16, 17, 25])
def test_a_position_that_kills_ends_its_request_alone(number: int, num_groups: int) -> None:
    rig = Rig(num_groups)
    last = num_groups - 1

    def caches() -> set[int]:
        states = [w._pool.peek(last, "a") for w in rig.actors if isinstance(w, Worker)]
        return {id(state.cache) for state in states if state is not None}

    def add_worker() -> None:
        groups: dict[int, Any] = {g: rig.layer_group(g) for g in range(num_groups)}
        groups[last] = Poisoned(groups[last], len(PROMPT) + number - 1, caches)
        rig.add_worker(layer_groups=groups)

    add_worker()
    rig.add_scheduler()
    for request_id, prompt, sampling in ASKED:
        rig.submit(Request(request_id, token_ids=prompt, sampling=sampling))
    num_crashes = 0

    def have_ended() -> bool:
        nonlocal num_crashes
        while num_crashes < rig.num_crashes:
            num_crashes += 1
            add_worker()
        return all(rig.ledger.get(i) and rig.record(i).finish_reason for i in "abc")

    rig.run_until(have_ended)
    rig.run_until_quiet()

    assert rig.num_crashes <= 4  # one that stayed, and three of what came of it
    assert "died 3 times" in rig.final_events("a")[0].error
    assert len(rig.tokens("a")) == number
    assert_answers(rig, ASKED[1:])
    assert rig.num_dead() == 1


# everything at once

STRIKES = ["kill", "lose", "freeze", "hand_back", "kv", "ledger"]
REDRIVEN = [*STRIKES, "evict", "flush"]  # what nobody but a scheduler makes good, at its worst


class Storm:
    """One to three workers of all groups, each of which can be struck, and what they are asked."""

    def __init__(self, rng: random.Random, num_groups: int, *, has_scheduler: bool) -> None:
        limits = WorkerLimits(
            max_batch_rows=rng.choice([12, 128]),
            prefetch=rng.choice([2, 32]),
            kv_cache_bytes=rng.choice([40_000, 200_000, 1 << 30]),
            max_attempts=1_000,  # by chance a step may meet more deaths than a killer's
            park_limit_s=1_000.0,
        )
        self.rig = Rig(num_groups, limits=limits)
        self.asked = [
            (f"r{n}", prompt_of(rng.randint(1, 40), salt=n), rng.choice([LONG, SHAPED, GREEDY]))
            for n in range(rng.randint(2, 6))
        ]
        self._rng = rng
        self._groups = range(num_groups)
        self._kv, self._ledger = Weather(self.rig.kv_pages), Weather(self.rig.ledger)
        self._parts = [self._new_part() for _ in range(rng.randint(1, 3))]
        self._frozen: tuple[int, Any] | None = None
        if has_scheduler:
            self.rig.add_scheduler()
            for request_id, prompt, sampling in self.asked:
                self.rig.submit(Request(request_id, token_ids=prompt, sampling=sampling))
        else:
            start(self.rig, self.asked)

    def strike(self, kind: str) -> None:
        number = self._rng.randrange(len(self._parts))
        worker, line = self._parts[number]
        match kind:
            case "kill":
                self.thaw()
                self.rig.kill(worker)
                self._parts[number] = self._new_part()
            case "lose":
                line.lose()
            case "freeze":
                self.thaw()
                self._frozen = number, self.rig.freeze(worker)
            case "hand_back":
                self.thaw()
                worker.hand_back_all()
                worker.resume()
            case "kv":
                self._kv.num_failures = self._rng.randint(1, 6)
            case "ledger":
                self._ledger.num_failures = self._rng.randint(1, 6)
            case "evict":
                worker._pool.drop_group(self._rng.choice(self._groups))
            case "flush":
                if found := self.rig.stores.kv.run(("KEYS", "*:kv:*")):
                    self.rig.stores.kv.run(("DEL", *found))

    def thaw(self) -> None:
        if self._frozen is not None:
            self.rig.thaw(self._frozen[1])
            self._frozen = None

    def _new_part(self) -> tuple[Worker, LosableBroker]:
        line = LosableBroker(self.rig.hub)
        worker = self.rig.add_worker(
            *self._groups, broker=line, ledger=self._ledger, kv_pages=self._kv
        )
        return worker, line


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("num_groups", "has_scheduler"), [(1, False), (1, True), (2, True)], ids=str
)
def test_no_order_of_faults_changes_a_token(
    num_groups: int, has_scheduler: bool, seed: int
) -> None:
    rng = random.Random(seed)
    storm = Storm(rng, num_groups, has_scheduler=has_scheduler)
    rig = storm.rig

    for _ in range(rng.randint(5, 30)):
        for _ in range(rng.randint(0, 6)):
            rig.turn()
        storm.strike(rng.choice(REDRIVEN if has_scheduler else STRIKES))
    storm.thaw()
    if has_scheduler:
        rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)
        rig.clock.sleep(1_000.0)  # a late copy may wait for rows that are deleted
    finish(rig, storm.asked)

    if has_scheduler:
        assert leftover_keys(rig.stores, [request_id for request_id, _, _ in storm.asked]) == []
