"""Steps go to the worker that has their rows, and to any other when that one is dead or slow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shared.store.presence_types import WorkerState
from shared.topology import inbox_queue
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, prompt_of

ASKED = [(f"r{n}", prompt_of(9 + n, salt=n), SAMPLED) for n in range(4)]


def start_asked(rig: Rig) -> None:
    for request_id, prompt, sampling in ASKED:
        rig.start(request_id, prompt, sampling)


def finish_asked(rig: Rig) -> None:
    rig.run_until_done(*(request_id for request_id, _, _ in ASKED))
    rig.run_until_quiet()
    assert_answers(rig, ASKED)
    assert rig.num_dead() == 0


def test_a_request_stays_with_the_workers_that_have_its_rows() -> None:
    rig = Rig(2)
    workers = rig.add_workers(2)

    rig.start("r", prompt_of(30), GREEDY)
    rig.run_until_done("r")

    # the prompt and 11 decode steps, in one worker of each group
    assert sorted(worker.num_steps_done for worker in workers) == [0, 0, 12, 12]
    assert_answers(rig, [("r", prompt_of(30), GREEDY)])


def test_the_slices_of_a_prompt_stay_together() -> None:
    from services.worker.limits import WorkerLimits

    rig = Rig(3, limits=WorkerLimits(max_batch_rows=8))
    workers = rig.add_workers(3)

    rig.start("r", prompt_of(60), GREEDY)
    rig.run_until_done("r")

    active = Counter(worker.groups for worker in workers if worker.num_steps_done)
    assert active == {(0,): 1, (1,): 1, (2,): 1}


def test_first_contacts_spread_over_the_workers() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    pair = [rig.add_worker(1), rig.add_worker(1)]

    start_asked(rig)
    finish_asked(rig)

    assert [worker.num_steps_done for worker in pair] == [24, 24]


def test_the_steps_of_a_dead_worker_go_to_another_of_its_group() -> None:
    rig = Rig(2)
    workers = rig.add_workers(2)
    start_asked(rig)
    rig.run_until(lambda: all(len(rig.tokens(r)) >= 3 for r, _, _ in ASKED))

    # one of each group dies, and presence still tells of it
    rig.kill(workers[0])
    rig.kill(workers[2])
    finish_asked(rig)


def test_a_worker_that_is_known_to_be_gone_gets_nothing() -> None:
    rig = Rig(2)
    workers = rig.add_workers(2)
    start_asked(rig)
    rig.run_until(lambda: all(len(rig.tokens(r)) >= 3 for r, _, _ in ASKED))
    rig.kill(workers[0])
    del rig.peers["w1"]
    rig.clock.sleep(2.0)  # what was on its way is handed over, and presence is read again

    started_s = rig.clock()
    finish_asked(rig)

    assert rig.clock() - started_s < 0.9  # nothing waited in its inbox


def test_a_worker_that_drains_gets_no_new_steps() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    leaver, heir = rig.add_worker(1), rig.add_worker(1)
    start_asked(rig)
    rig.run_until(lambda: all(len(rig.tokens(r)) >= 3 for r, _, _ in ASKED))

    rig.peers["w2"] = replace(rig.peers["w2"], state=WorkerState.DRAINING)
    rig.clock.sleep(1.1)
    rig.turn()
    done = leaver.num_steps_done
    finish_asked(rig)

    assert leaver.num_steps_done <= done + len(ASKED)
    assert heir.num_steps_done > 24


def test_a_frozen_worker_is_passed_by_and_what_it_does_later_harms_nothing() -> None:
    rig = Rig(2)
    workers = rig.add_workers(2)
    start_asked(rig)
    rig.run_until(lambda: all(len(rig.tokens(r)) >= 3 for r, _, _ in ASKED))
    frozen = rig.freeze(workers[0])

    rig.run_until_done(*(request_id for request_id, _, _ in ASKED[1:2]))
    rig.thaw(frozen)
    finish_asked(rig)


def test_an_inbox_that_has_expired_is_no_loss() -> None:
    rig = Rig(2)
    workers = rig.add_workers(2)
    rig.kill(workers[2])
    rig.clock.sleep(61.0)
    assert rig.front.depth(inbox_queue("w3", 1)) is None

    start_asked(rig)
    started_s = rig.clock()
    finish_asked(rig)

    assert rig.clock() - started_s < 0.9  # unroutable: it went to the group at once


@pytest.mark.parametrize("order", [1, -1])
def test_what_a_leaving_worker_holds_goes_to_its_group_at_once(order: int) -> None:
    rig = Rig(2)
    rig.add_worker(0)
    pair = [rig.add_worker(1), rig.add_worker(1)][::order]
    start_asked(rig)
    rig.run_until(lambda: all(len(rig.tokens(r)) >= 3 for r, _, _ in ASKED))

    pair[0].hand_back_all()
    rig.kill(pair[0])
    finish_asked(rig)


def test_the_embedded_pipeline_has_no_inboxes() -> None:
    rig = Rig(2, embedded=True)
    rig.add_workers()

    start_asked(rig)
    finish_asked(rig)

    assert not [name for name in rig.hub.queues if ".inbox." in name]
