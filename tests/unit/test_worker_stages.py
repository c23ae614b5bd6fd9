"""What a worker tells of where its time goes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.cli.overview import Overview
from services.worker.batch import Pending, Slice
from services.worker.stages import COMPUTE, REDIS, Stages
from shared.broker.base import Delivery
from shared.broker.rabbitmq.ids import message_id, sent_unix_us, tag_of
from shared.messages import Step
from shared.store.presence_types import STAGES, WorkerInfo
from tests.rig import Rig
from tests.rig_model import GREEDY, prompt_of
from tests.steps import a_step, hidden


@pytest.fixture
def decode_step() -> Step:
    return a_step(Rig(num_groups=2), "r-1")


def arrived(step: Step, *, sent: int = 0, at: int = 0, decode_ns: int = 0) -> Slice:
    delivery = Delivery("q", b"", False, "", "", "", None, sent_unix_us=sent, arrived_unix_us=at)
    item = Pending(delivery, step, decode_ns=decode_ns)
    return Slice(item, 0, step.num_positions)


def stages_at(times_us: Sequence[int], *, began_unix_us: int = 0) -> Stages:
    times = iter(times_us)
    return Stages(clock_ns=lambda: next(times) * 1000, unix_us=lambda: began_unix_us)


def told(stages: Stages) -> dict[str, int]:
    return {name: us for name, us in zip(STAGES, stages.totals_us(), strict=True) if us}


def test_every_step_of_a_batch_waits_for_all_of_it(decode_step: Step) -> None:
    stages = stages_at([0, 30, 35, 45])

    stages.begin()
    stages.lap(COMPUTE)
    stages.lap(REDIS)
    stages.lap(COMPUTE)
    stages.end([arrived(decode_step), arrived(decode_step)])

    assert told(stages) == {"compute": 2 * 40, "redis": 2 * 5}
    assert (stages.num_steps, stages.num_turns) == (2, 1)


def test_what_came_before_the_turn_is_told_apart(decode_step: Step) -> None:
    stages = stages_at([0], began_unix_us=1_500)

    stages.begin()
    stages.end([arrived(decode_step, sent=1_000, at=1_200, decode_ns=50_000)])

    assert told(stages) == {"broker": 200, "queue": 250, "decode": 50}


def test_a_broker_that_stamps_nothing_is_not_counted(decode_step: Step) -> None:
    stages = stages_at([0], began_unix_us=1_500)

    stages.begin()
    stages.end([arrived(decode_step)])

    assert told(stages) == {}
    assert stages.num_steps == 1


def test_prompts_and_turns_that_failed_are_left_out(decode_step: Step) -> None:
    prompt = a_step(Rig(num_groups=2), "r-2", tensors=hidden(rows=3))
    stages = stages_at([0, 10, 20, 30, 40, 45])

    stages.begin()
    stages.lap(COMPUTE)  # and it ends there
    stages.begin()
    stages.lap(COMPUTE)
    stages.end([arrived(prompt)])
    stages.begin()
    stages.lap(COMPUTE)
    stages.end([arrived(decode_step)])

    assert told(stages) == {"compute": 5}
    assert stages.num_steps == 1


def test_a_worker_counts_each_decode_step_it_computes() -> None:
    rig = Rig(num_groups=2)
    workers = rig.add_workers()
    rig.start("a", prompt_of(20), GREEDY)

    rig.run_until_done("a")

    # The first token comes from the prompt, each further one from a step in every group.
    assert [worker.stages.num_steps for worker in workers] == [GREEDY.max_tokens - 1] * 2
    # What the last group writes beside a token's way counts as confirm.
    for worker, store in zip(workers, ("redis", "confirm"), strict=True):
        spent = dict(zip(STAGES, worker.stages.totals_us(), strict=True))
        assert all(spent[name] > 0 for name in ("prepare", "compute", store, "publish"))


def test_status_tells_the_mean_of_each_stage() -> None:
    told_us = tuple(10 * (number + 1) for number in range(len(STAGES)))
    workers = [
        WorkerInfo("new"),
        WorkerInfo("busy", num_decode_steps=4, num_decode_turns=2, stage_us=told_us),
    ]

    new, busy = Overview(workers=workers).to_dict()["workers"]

    assert new["stages_us"] == {}
    assert list(busy["stages_us"].values()) == [us / 4 for us in told_us]


def test_an_id_tells_which_message_it_is_and_when_it_was_handed_over() -> None:
    text = message_id(17, 1_780_000_000_000_001)

    assert tag_of(text) == 17
    assert sent_unix_us(text) == 1_780_000_000_000_001


@pytest.mark.parametrize("foreign", [None, "", "17", "17-", "a-1", "1-2-3", "1-²", "1-" + "9" * 30])
def test_ids_of_other_publishers_tell_no_time(foreign: str | None) -> None:
    assert sent_unix_us(foreign) == 0
