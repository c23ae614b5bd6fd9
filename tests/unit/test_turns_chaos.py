"""Every order of deaths, losses, copies and store failures leaves the same tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from services.scheduler.scheduler import Scheduler
from services.worker.limits import WorkerLimits
from services.worker.worker import Worker
from shared.messages import Request, SamplingParams
from shared.store.leftovers import leftover_keys
from shared.topology import REQUESTS_QUEUE
from tests.faults import LosableBroker, Weather
from tests.rig import Rig, assert_answers
from tests.rig_model import SAMPLED, prompt_of

NUM_GROUPS = 2
SHAPED = replace(SAMPLED, frequency_penalty=0.3, repetition_penalty=1.1, logprobs=1)
ASKED = [
    ("a", prompt_of(10) * 4, SAMPLED),
    ("b", prompt_of(3, salt=4) * 3, SamplingParams(seed=3, max_tokens=14, ignore_eos=True)),
    ("c", prompt_of(23, salt=2), SHAPED),
]
# Asked later, when pages of the first may be shared.
ASKED_LATER = [
    ("d", prompt_of(10) * 4 + prompt_of(5, salt=3), SAMPLED),
    ("e", prompt_of(10) * 4, SamplingParams(seed=3, max_tokens=8, ignore_eos=True)),
]
# Every worker sleeps on the rig's one clock, so a back-off ages what others have parked.
LIMITS = WorkerLimits(max_batch_rows=12, park_limit_s=1_000.0, kv_cache_bytes=40_000)
# Three deaths may meet one step by chance, which makes it no killer; but the worker cannot know.
PATIENT = replace(LIMITS, max_attempts=1_000)

events = st.one_of(
    st.just(("nothing",)),
    st.tuples(st.sampled_from(["kill", "lose", "copy", "drop"]), st.integers(0, 2 * NUM_GROUPS)),
    st.just(("flush",)),
    st.tuples(st.sampled_from(["kv", "ledger", "prefixes"]), st.integers(1, 6)),
    st.tuples(st.just("evict"), st.integers(0, 9)),
)


class Cluster:
    """A scheduler and two workers a group, each of which can be struck."""

    def __init__(self, limits: WorkerLimits) -> None:
        self.rig = Rig(NUM_GROUPS, limits=limits)
        self.kv, self.ledger = Weather(self.rig.kv_pages), Weather(self.rig.ledger)
        self.prefixes = Weather(self.rig.prefixes)
        self.parts: list[tuple[Worker | Scheduler, LosableBroker]] = []
        for index in range(2 * NUM_GROUPS + 1):
            self.parts.append(self.new_part(index))

    def new_part(self, index: int) -> tuple[Worker | Scheduler, LosableBroker]:
        line = LosableBroker(self.rig.hub)
        if index == 2 * NUM_GROUPS:
            scheduler = self.rig.add_scheduler(
                broker=line, ledger=self.ledger, prefix_pages=self.prefixes
            )
            return scheduler, line
        part = self.rig.add_worker(
            index % NUM_GROUPS, broker=line, ledger=self.ledger, kv_pages=self.kv
        )
        return part, line

    def strike(self, kind: str, number: int = 0) -> None:
        match kind:
            case "kill":
                self.rig.kill(self.parts[number][0])
                self.parts[number] = self.new_part(number)
            case "lose":
                self.parts[number][1].lose()
            case "copy":
                self.copy_oldest_step(number % NUM_GROUPS)
            case "drop":
                self.drop_steps()
            case "flush":
                if found := self.rig.stores.kv.run(("KEYS", "*:kv:*")):
                    self.rig.stores.kv.run(("DEL", *found))
            case "kv":
                self.kv.num_failures = number
            case "ledger":
                self.ledger.num_failures = number
            case "prefixes":
                self.prefixes.num_failures = number
            case "evict":
                if found := sorted(self.rig.stores.kv.run(("KEYS", "*:prefix:*"))):
                    self.rig.stores.kv.run(("DEL", found[number % len(found)]))

    def drop_steps(self) -> None:
        """As a broker's restart does, here with that of all workers."""
        for part, _ in self.parts[: 2 * NUM_GROUPS]:
            self.rig.kill(part)
        for name, queue in self.rig.hub.queues.items():
            if re.search(r"\.g\d+\Z", name):
                queue.ready.clear()
        for index in range(2 * NUM_GROUPS):
            self.parts[index] = self.new_part(index)

    def copy_oldest_step(self, group: int) -> None:
        queue = self.rig.hub.queues[self.rig.queue(group)]
        held = [m for consumer in queue.consumers for m in consumer.held.values()]
        if held:
            self.rig.publish(self.rig.queue(group), held[0].outgoing.body)


# One death and two lost connections during one step; two deaths and a lost connection.
NOT_POISON: list[list[tuple[Any, ...]]] = [
    [("nothing",), ("nothing",), ("copy", 0), ("kv", 5), ("nothing",), ("copy", 0), ("lose", 2),
     ("nothing",), ("kv", 6), *[("nothing",)] * 7, ("kill", 0), *[("nothing",)] * 4, ("lose", 2)],
    [("nothing",), ("kill", 0), ("kill", 2), ("lose", 0)],
]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(events, max_size=40), st.booleans())
def test_no_fault_changes_a_token_or_an_end(
    strikes: Sequence[tuple[Any, ...]], speculation: bool
) -> None:
    run(strikes, PATIENT, speculation=speculation)


@pytest.mark.parametrize("strikes", NOT_POISON)
@pytest.mark.parametrize("speculation", [False, True])
def test_who_lost_a_connection_has_not_died(
    strikes: Sequence[tuple[Any, ...]], speculation: bool
) -> None:
    run(strikes, LIMITS, speculation=speculation)


def run(strikes: Sequence[tuple[Any, ...]], limits: WorkerLimits, *, speculation: bool) -> None:
    cluster = Cluster(limits)
    rig = cluster.rig
    rig.open_reply_queue("mine")
    for request_id, prompt, sampling in ASKED:
        params = replace(sampling, speculation=speculation)
        rig.submit(Request(request_id, token_ids=prompt, sampling=params), reply_to="mine")

    for strike in strikes[: len(strikes) // 2]:
        cluster.strike(*strike)
        rig.turn()
    for request_id, prompt, sampling in ASKED_LATER:
        rig.submit(Request(request_id, token_ids=prompt, sampling=sampling), reply_to="mine")
    for strike in strikes[len(strikes) // 2 :]:
        cluster.strike(*strike)
        rig.turn()
    rig.run_until(lambda: rig.num_messages(REQUESTS_QUEUE) == 0)
    rig.clock.sleep(LIMITS.park_limit_s)  # a late copy may wait for rows that are deleted
    rig.run_until_quiet()

    assert_answers(rig, [*ASKED, *ASKED_LATER])
    assert rig.num_messages(REQUESTS_QUEUE) == 0
    assert rig.num_dead() == 0
    assert {reply.request_id for reply in rig.replies("mine")} == set("abcde")
    assert leftover_keys(rig.stores, "abcde") == []
