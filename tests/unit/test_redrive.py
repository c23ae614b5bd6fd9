"""A request whose step was lost is driven on, once, by whoever holds it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.scheduler.scheduler import Scheduler
from services.worker.limits import WorkerLimits
from services.worker.worker import Worker
from shared import codec
from shared.broker.base import Outgoing
from shared.errors import StoreUnavailable
from shared.messages import Request, Step
from shared.store import keys
from shared.topology import REQUESTS_QUEUE
from tests.faults import Crash, LossyBroker, Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

NUM_GROUPS = 3
PROMPT = prompt_of(20)
ALL = range(1, 10_000)


def make_request(request_id: str = "r", **changes: Any) -> Request:
    values: dict[str, Any] = {"token_ids": PROMPT, "sampling": SAMPLED}
    return Request(request_id, **(values | changes))


def run_until_idle(rig: Rig, *schedulers: Scheduler) -> None:
    rig.run_until(
        lambda: (
            rig.num_messages(REQUESTS_QUEUE) == 0 and not any(s.num_in_flight for s in schedulers)
        )
    )


def run_for(rig: Rig, seconds: float) -> None:
    end_s = rig.clock() + seconds
    while rig.clock() < end_s:
        rig.turn()


def lossy(rig: Rig, group: int, lost: Any) -> LossyBroker:
    """Loses the steps to `group` that are numbered in `lost`."""
    return LossyBroker(
        rig.new_broker(), lost, only_if=lambda message: message.queue.endswith(f".g{group}")
    )


def lose_step(rig: Rig, worker: Worker) -> Worker:
    """Lose the decode step that a worker of group 0 holds after a turn of all, and the worker."""
    queues = [name for name in rig.hub.queues if name.endswith(".g0")]
    assert sum(rig.num_messages(name) for name in queues) == 1
    rig.kill(worker)
    for name in queues:
        rig.hub.queues[name].ready.clear()
    return rig.add_worker(0)


def steps_of(line: LossyBroker) -> list[Step]:
    steps = [codec.decode(message.body) for message in line.seen]
    assert all(isinstance(step, Step) for step in steps)
    return steps  # type: ignore[return-value]


def crew(rig: Rig, *, lost_to: int, lost: Any) -> Scheduler:
    """One worker a group and a scheduler; whoever sends to `lost_to` loses what is in `lost`."""
    for group in range(NUM_GROUPS):
        sends_to = (group + 1) % NUM_GROUPS
        rig.add_worker(group, broker=lossy(rig, sends_to, lost) if sends_to == lost_to else None)
    return rig.add_scheduler()


@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_a_lost_step_is_redriven_once_and_changes_no_token(group: int, nth: int) -> None:
    rig = Rig(NUM_GROUPS)
    scheduler = crew(rig, lost_to=group, lost={nth})
    rig.open_reply_queue("mine")

    rig.submit(make_request(), reply_to="mine")
    run_until_idle(rig, scheduler)

    assert scheduler.num_redrives == 1
    assert_answers(rig, [("r", PROMPT, SAMPLED)])
    assert len(rig.replies("mine")) == 1


def test_a_start_that_was_lost_is_sent_again() -> None:
    rig = Rig(NUM_GROUPS)
    rig.add_workers()
    scheduler = rig.add_scheduler(broker=lossy(rig, 0, {1}))

    rig.submit(make_request())
    started_s = rig.clock()
    run_until_idle(rig, scheduler)

    assert scheduler.num_redrives == 1
    assert rig.clock() - started_s < 4.0
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_an_undisturbed_request_is_never_redriven() -> None:
    rig = Rig(NUM_GROUPS)
    scheduler = crew(rig, lost_to=0, lost=())

    for number in range(8):
        rig.submit(make_request(f"r{number}"))
    run_until_idle(rig, scheduler)

    assert scheduler.num_redrives == 0
    assert all(rig.record(f"r{number}").epoch == 0 for number in range(8))


def test_an_intact_cache_resends_one_token_and_a_lost_one_the_prompt() -> None:
    rig = Rig(NUM_GROUPS)
    workers = rig.add_workers()
    line = lossy(rig, 0, ())
    scheduler = rig.add_scheduler(broker=line)
    rig.submit(make_request())
    rig.run_until(lambda: len(rig.tokens("r")) == 4)

    # given a step that is lost in the hands of a worker
    workers[0] = lose_step(rig, workers[0])
    rig.run_until(lambda: len(rig.tokens("r")) == 8)
    # and then all rows, with those who have copies of them
    rig.stores.kv.run(("DEL", *rig.stores.kv.run(("KEYS", "*:kv:*"))))
    for worker in workers:
        rig.kill(worker)
    rig.add_workers()
    run_until_idle(rig, scheduler)

    start, step, everything = steps_of(line)
    assert (start.position, start.num_positions) == (0, 20)
    assert (step.position, step.num_positions) == (23, 1)
    assert (everything.position, everything.num_positions) == (0, 28)
    assert start.epoch < step.epoch < everything.epoch
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_zombie_of_an_old_epoch_commits_nothing() -> None:
    # given a step for the last group that somebody still holds when the request is driven again
    rig = Rig(2)
    rig.add_worker(0)
    scheduler = rig.add_scheduler()
    rig.submit(make_request())
    rig.run_until(lambda: rig.num_ready(rig.queue(1)) == 1)
    (old,) = rig.take_all(rig.queue(1))
    rig.run_until(lambda: scheduler.num_redrives == 1)
    new: list[Step] = []
    rig.run_until(lambda: bool(new.extend(rig.take_all(rig.queue(1))) or new))
    rig.close_taps()

    # when it passes it on with other bits
    garbage = np.full_like(old.tensors["hidden"], 0.5)
    rig.publish_step(replace(old, tensors={"hidden": garbage}))
    rig.add_worker(1)
    rig.run_until(lambda: rig.num_messages(rig.queue(1)) == 0)

    assert rig.tokens("r") == []
    rig.publish_step(new[0])
    run_until_idle(rig, scheduler)
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


class SlowGroup:
    """A layer group on a machine that needs `seconds` for every batch."""

    def __init__(self, rig: Rig, group: int, seconds: float) -> None:
        self._rig, self._inner, self._seconds = rig, rig.layer_group(group), seconds

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._rig.clock.sleep(self._seconds)
        return self._inner.forward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def test_slow_step_is_not_redriven_while_it_progresses() -> None:
    # given a prompt of which every slice takes almost as long as the patience is
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=8))
    rig.add_worker(0, layer_groups={0: SlowGroup(rig, 0, 0.7)})
    rig.add_worker(1)
    scheduler = rig.add_scheduler()
    prompt = prompt_of(200)

    rig.submit(make_request(token_ids=prompt))
    started_s = rig.clock()
    run_until_idle(rig, scheduler)

    assert rig.clock() - started_s > 15.0
    assert scheduler.num_redrives == 0
    assert_answers(rig, [("r", prompt, SAMPLED)])


def test_steps_that_take_longer_than_the_first_patience_are_not_fenced_for_ever() -> None:
    rig = Rig(2)
    rig.add_worker(0, layer_groups={0: SlowGroup(rig, 0, 3.0)})
    rig.add_worker(1)
    scheduler = rig.add_scheduler()

    rig.submit(make_request())
    run_until_idle(rig, scheduler)

    assert scheduler.num_redrives <= 3
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_backlog_is_no_loss() -> None:
    # given more prompts than a slow worker computes within the patience
    rig = Rig(2, limits=WorkerLimits(max_batch_rows=20, prefetch=4))
    rig.add_worker(0, layer_groups={0: SlowGroup(rig, 0, 0.3)})
    rig.add_worker(1)
    scheduler = rig.add_scheduler()
    asked = [(f"r{n}", prompt_of(20, salt=n), replace(SAMPLED, max_tokens=3)) for n in range(30)]

    for request_id, prompt, sampling in asked:
        rig.submit(Request(request_id, token_ids=prompt, sampling=sampling))
    run_until_idle(rig, scheduler)

    assert scheduler.num_redrives <= 3
    assert_answers(rig, asked)


def test_redrives_back_off_and_end_by_name() -> None:
    rig = Rig(NUM_GROUPS)
    scheduler = crew(rig, lost_to=1, lost=ALL)
    rig.open_reply_queue("mine")
    redriven_s: list[float] = []

    rig.submit(make_request(), reply_to="mine")
    while not rig.num_ready("mine"):
        rig.turn()
        rig.clock.sleep(0.05)
        if scheduler.num_redrives > len(redriven_s):
            redriven_s.append(rig.clock())
        assert rig.clock() < 1_500.0

    waits = np.diff(redriven_s)
    assert (waits[1:] >= 0.75 * waits[:-1]).all()
    assert waits.max() <= 30.5
    (reply,) = rig.replies("mine")
    assert "layer group 1 of 3 is the first that does not answer" in reply.error
    assert scheduler.num_redrives == 8
    assert len(rig.final_events("r")) == 1


def test_a_dead_schedulers_request_whose_step_was_lost_is_revived_by_the_next() -> None:
    rig = Rig(NUM_GROUPS)
    workers = rig.add_workers()
    first = rig.add_scheduler()
    rig.open_reply_queue("mine")
    rig.submit(make_request(), reply_to="mine")
    rig.run_until(lambda: len(rig.tokens("r")) == 5)

    rig.kill(first)
    lose_step(rig, workers[0])
    second = rig.add_scheduler()
    run_until_idle(rig, second)

    assert second.num_redrives == 1
    assert_answers(rig, [("r", PROMPT, SAMPLED)])
    assert len(rig.replies("mine")) == 1


def test_a_start_that_a_dead_scheduler_lost_downstream_is_revived_by_the_next() -> None:
    """Group 0 acks a start of the same epoch as a repeat, so adoption needs a new one."""
    rig = Rig(NUM_GROUPS)
    rig.add_worker(0, broker=lossy(rig, 1, {1}))
    rig.add_worker(1)
    rig.add_worker(2)
    first = rig.add_scheduler()
    rig.submit(make_request())
    rig.run_until(lambda: rig.num_kv_rows("r")[0] == 20)

    rig.kill(first)
    second = rig.add_scheduler()
    run_until_idle(rig, second)

    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_of_two_schedulers_that_hold_a_request_one_drives_it_on() -> None:
    # given two that see the same state, since the answer of one comes late
    rig = Rig(NUM_GROUPS)
    workers = rig.add_workers()

    class LateStates:
        """Answers `states` with what held at the call before."""

        def __init__(self) -> None:
            self._last: dict[str, Any] = {}

        def states(self, request_ids: Any) -> Any:
            last, self._last = self._last, rig.ledger.states(request_ids)
            return {i: last.get(i, self._last[i]) for i in self._last}

        def __getattr__(self, name: str) -> Any:
            return getattr(rig.ledger, name)

    lines = [lossy(rig, 0, ()), lossy(rig, 0, ())]
    schedulers = []
    for line in lines:
        schedulers.append(rig.add_scheduler(broker=line, ledger=LateStates()))
        rig.submit(make_request())
        schedulers[-1].turn(0.0)
    rig.run_until(lambda: len(rig.tokens("r")) == 4)
    num_sent = sum(len(line.seen) for line in lines)

    lose_step(rig, workers[0])
    run_until_idle(rig, *schedulers)

    assert sum(len(line.seen) for line in lines) == num_sent + 1
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_nothing_is_redriven_while_a_group_has_no_worker_or_for_that_time() -> None:
    rig = Rig(NUM_GROUPS)
    workers = rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.submit(make_request())
    rig.run_until(lambda: len(rig.tokens("r")) == 4)

    rig.kill(workers[1])
    rig.coverage = [1, 0, 1]
    run_for(rig, 10.0)
    rig.coverage = [1, 1, 1]
    rig.add_worker(1)
    run_until_idle(rig, scheduler)

    assert scheduler.num_redrives <= 1  # in the second before its absence was seen
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_store_that_is_away_for_long_makes_nobody_look_lost() -> None:
    rig = Rig(NUM_GROUPS)
    rig.add_workers()
    flaky = Tripwire(rig.ledger, "states", StoreUnavailable("down"), nth=3, times=12)
    scheduler = rig.add_scheduler(ledger=flaky)

    rig.submit(make_request(sampling=replace(SAMPLED, max_tokens=60)))
    run_until_idle(rig, scheduler)

    assert flaky.num_calls > 15
    assert scheduler.num_redrives == 0


@pytest.mark.parametrize("method", ["advance_epoch", "get", "tokens"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("error", [Crash, StoreUnavailable("down")], ids=["dies", "fails"])
def test_a_redrive_that_is_cut_short_is_done_again(method: str, after: bool, error: Any) -> None:
    rig = Rig(NUM_GROUPS)
    workers = rig.add_workers()
    flaky = Tripwire(rig.ledger, method, error, after=after, times=0)
    rig.add_scheduler(ledger=flaky)
    rig.submit(make_request())
    rig.run_until(lambda: len(rig.tokens("r")) == 4)

    lose_step(rig, workers[0])
    flaky.arm()
    rig.run_until(lambda: flaky.has_fired)
    if error is Crash:
        rig.add_scheduler()
    rig.run_until_done("r")
    rig.run_until_quiet()

    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_redrive_that_is_not_confirmed_is_sent_again() -> None:
    rig = Rig(NUM_GROUPS)
    workers = rig.add_workers()
    deaf = Tripwire(
        rig.new_broker(),
        "publish",
        StoreUnavailable("no confirm"),
        after=True,
        nth=2,
        times=2,
        only_if=lambda messages: messages[0].queue.endswith(".g0"),
    )
    scheduler = rig.add_scheduler(broker=deaf)
    rig.submit(make_request())
    rig.run_until(lambda: len(rig.tokens("r")) == 4)

    lose_step(rig, workers[0])
    run_until_idle(rig, scheduler)

    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_late_rows_of_a_fenced_step_do_not_stay_behind() -> None:
    rig = Rig(NUM_GROUPS)
    scheduler = crew(rig, lost_to=1, lost={3})
    rig.submit(make_request())
    run_until_idle(rig, scheduler)

    row_bytes = rig.layout.num_layers(0) * rig.config.kv_row_bytes_per_layer
    rig.kv_pages.write("r", 0, 0, bytes(5 * row_bytes))  # as a zombie would
    run_for(rig, 25.0)

    assert rig.num_kv_rows("r") == [0, 0, 0]


def test_an_outgoing_message_is_forgotten_only_where_the_test_says_so() -> None:
    rig = Rig(1)
    line = LossyBroker(rig.new_broker(), {2})

    for body in (b"1", b"2", b"3"):
        line.publish([Outgoing(rig.queue(0), body)]).wait(0.0)

    assert rig.num_ready(rig.queue(0)) == 2


def test_tokens_that_the_store_lost_in_a_crash_come_again() -> None:
    """A meta store on AOF everysec may forget its last second: the request goes on from there."""
    rig = Rig(NUM_GROUPS)
    rig.add_workers()
    scheduler = rig.add_scheduler()
    rig.submit(make_request())
    rig.run_until(lambda: len(rig.tokens("r")) == 3)
    ledger_key, events_key = keys.ledger("r"), keys.events("r")
    before = [rig.stores.meta.run(("DUMP", key)) for key in (ledger_key, events_key)]
    rig.run_until(lambda: len(rig.tokens("r")) == 8)

    rig.stores.meta.run(("DEL", ledger_key, events_key))
    for key, dump in zip((ledger_key, events_key), before, strict=True):
        rig.stores.meta.run(("RESTORE", key, 0, dump))
    run_until_idle(rig, scheduler)

    assert scheduler.num_redrives == 1
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


def test_a_store_that_refuses_new_requests_does_not_keep_others_from_their_answers() -> None:
    """A meta store whose memory is full refuses what adds to it."""
    rig = Rig(NUM_GROUPS)
    rig.add_workers()
    full = Tripwire(
        rig.ledger, "admit", StoreUnavailable("OOM"), times=None,
        only_if=lambda record: record.request_id == "new",
    )  # fmt: skip
    rig.add_scheduler(ledger=full)
    rig.open_reply_queue("mine")

    rig.submit(make_request("old"), reply_to="mine")
    rig.submit(make_request("new"), reply_to="mine")
    rig.run_until(lambda: rig.num_ready("mine") == 1)

    assert full.num_calls < 20  # it backs off
    assert rig.num_messages(REQUESTS_QUEUE) == 1


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_a_frozen_worker_is_passed_over_by_the_second_redrive_at_the_latest(group: int) -> None:
    # given two workers a group, one of which takes steps and does nothing with them
    rig = Rig(NUM_GROUPS)
    workers = rig.add_workers(2)
    scheduler = rig.add_scheduler()
    rig.submit(make_request())
    rig.run_until(lambda: len(rig.tokens("r")) == 3)
    frozen = max(workers[2 * group : 2 * group + 2], key=lambda worker: worker.num_steps_done)

    rig.freeze(frozen)
    run_until_idle(rig, scheduler)

    assert 1 <= scheduler.num_redrives <= 2
    assert_answers(rig, [("r", PROMPT, SAMPLED)])


@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_a_killer_input_takes_down_three_workers_though_it_is_driven_again(group: int) -> None:
    """Replacements come late, so that the scheduler drives it on before they are there."""

    class KillerGroup:
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise Crash

        def __getattr__(self, name: str) -> Any:
            return getattr(rig.layer_group(group), name)

    rig = Rig(NUM_GROUPS)
    for other in set(range(NUM_GROUPS)) - {group}:
        rig.add_worker(other)
    scheduler = rig.add_scheduler()
    rig.open_reply_queue("mine")
    rig.submit(make_request(), reply_to="mine")

    for _ in range(10):
        known = rig.num_crashes
        name = f"killed{known}"
        rig.add_worker(layer_groups={group: KillerGroup()}, worker_id=name)
        for _ in range(20):
            rig.turn()
        if rig.num_crashes > known:
            rig.peers.pop(name)
            run_for(rig, 4.0)

    (reply,) = rig.replies("mine")
    assert rig.num_crashes == 3
    assert scheduler.num_redrives >= 1
    assert f"layer group {group} died 3 times" in reply.error
    assert rig.num_dead() == 1
