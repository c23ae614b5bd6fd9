"""Bias and penalties depend on the tokens so far, and on nothing that happens on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.worker.sequences import SequencePool
from services.worker.shaping import NotYet, Shaping, processors_of
from shared import codec
from shared.broker.base import Outgoing
from shared.errors import StoreUnavailable
from shared.messages import Request, SamplingParams, Step
from tests.faults import CALLS, Crash, LosableBroker, LossyBroker, Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, expected_tokens, prompt_of

PROMPT = prompt_of(7) * 4
SHAPED = replace(
    GREEDY,
    max_tokens=30,
    speculation=True,
    frequency_penalty=0.02,
    presence_penalty=0.01,
    repetition_penalty=1.02,
    logit_bias=((40, 0.5), (77, -100.0)),
)
WANDERING = replace(
    SAMPLED, max_tokens=30, temperature=0.2, speculation=True, min_p=0.05, frequency_penalty=-0.1
)
ASKED = [("greedy", PROMPT, SHAPED), ("sampled", prompt_of(5, salt=3) * 5, WANDERING)]
ALL = [*ASKED, ("plain", prompt_of(9), GREEDY)]


class Counted:
    """A ledger whose reads of whole texts are counted."""

    def __init__(self, inner: Any) -> None:
        self.num_reads = 0
        self._inner = inner

    def get(self, request_id: str) -> Any:
        self.num_reads += 1
        return self._inner.get(request_id)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def submit(rig: Rig, asked: Sequence[tuple[str, Sequence[int], SamplingParams]]) -> None:
    for request_id, prompt, sampling in asked:
        rig.submit(Request(request_id, token_ids=tuple(prompt), sampling=sampling))


def finish(rig: Rig, asked: Sequence[tuple[str, Sequence[int], SamplingParams]] = ALL) -> None:
    rig.run_until_quiet()
    assert_answers(rig, asked)
    assert rig.num_dead() == 0


def test_the_parameters_show_in_the_answers() -> None:
    for _, prompt, sampling in ASKED:
        plain = replace(
            sampling,
            min_p=0.0,
            frequency_penalty=0.0,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            logit_bias=(),
        )
        assert expected_tokens(tuple(prompt), sampling) != expected_tokens(tuple(prompt), plain)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("speculation", [False, True])
@pytest.mark.parametrize("how", ["embedded", "one worker", "two workers"])
def test_the_tokens_are_the_same_in_every_cut(how: str, speculation: bool, num_groups: int) -> None:
    rig = Rig(num_groups, embedded=how == "embedded")
    rig.add_workers(2 if how == "two workers" else 1)
    rig.add_scheduler()
    asked = [(i, p, replace(s, speculation=speculation)) for i, p, s in ALL]

    submit(rig, asked)

    finish(rig, asked)


def test_drafts_are_accepted_with_penalties() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    line = LossyBroker(rig.new_broker(), only_if=is_step)
    rig.add_worker(1, broker=line)
    rig.add_scheduler()
    looping = replace(SHAPED, frequency_penalty=-0.5, presence_penalty=0.0, repetition_penalty=1.0)

    submit(rig, [("r", PROMPT, looping)])

    finish(rig, [("r", PROMPT, looping)])
    steps = [codec.decode(message.body) for message in line.seen]
    assert sum(len(step.accepted) for step in steps if isinstance(step, Step)) > 0


def is_step(message: Outgoing) -> bool:
    return isinstance(codec.decode(message.body), Step)


CRASHES = [(Crash, call) for call in CALLS if call[0] == 1]
FAILURES = [(StoreUnavailable("gone"), call) for _, call in CRASHES if call[2] != "ack"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 6])
@pytest.mark.parametrize(("error", "call"), CRASHES + FAILURES)
def test_what_fails_in_the_last_group_changes_no_token(
    error: Any, call: tuple[int, str, str], nth: int, after: bool
) -> None:
    _, part, method = call
    rig = Rig(2)
    inner = {"kv_pages": rig.kv_pages, "ledger": rig.ledger, "broker": LosableBroker(rig.hub)}
    wire = Tripwire(inner[part], method, error, after=after, nth=nth)
    rig.add_worker(1, **{part: wire})
    rig.add_workers()
    rig.add_scheduler()

    submit(rig, ALL)

    finish(rig)
    assert wire.has_fired


def test_a_worker_that_takes_over_reads_the_text_once() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    first = rig.add_worker(1)
    rig.add_scheduler()
    submit(rig, ALL)
    rig.run_until(lambda: len(rig.tokens("greedy")) > 4)

    rig.kill(first)
    heir = Counted(rig.ledger)
    rig.add_worker(1, ledger=heir)

    finish(rig)
    # Once each for its logits, and for its guesses, which wait for a while first.
    assert 2 <= heir.num_reads <= 4


def test_a_request_that_shapes_nothing_costs_no_read() -> None:
    rig = Rig(1)
    counted = Counted(rig.ledger)
    rig.add_worker(0, ledger=counted)
    rig.start("plain", PROMPT, GREEDY)
    rig.start("shaped", PROMPT, replace(SHAPED, speculation=False))

    rig.run_until_done("plain", "shaped")

    assert counted.num_reads == 1
    assert b"shaped" not in codec.encode(rig_step(GREEDY))
    shaped = codec.encode(rig_step(SHAPED))
    assert b"step.v3" in shaped
    assert b"penalty" not in shaped
    assert b"logit_bias" not in shaped


def rig_step(sampling: SamplingParams) -> Step:
    return Rig(1).start("r", PROMPT, sampling)


def test_without_all_tokens_before_there_are_no_processors_and_no_commit() -> None:
    # A commit that comes after them might succeed: another worker may draw them meanwhile.
    rig = Rig(1)
    step = rig.start("r", PROMPT, SHAPED)
    shaping = Shaping(SequencePool(lambda _: rig.layer_group(0).new_cache(), None, max_bytes=0),
                      rig.ledger, 0, processors_of)  # fmt: skip
    later = replace(step, position=step.position + 2)
    assert shaping.take(step) is not None
    assert shaping.take(later) == NotYet()
    assert shaping.take(replace(step, request_id="unknown")) is None

    rig.ledger.commit("r", 0, step.end_position, [5, 6])

    assert shaping.take(later) not in (None, NotYet())


def test_processors_of_a_draw_that_came_to_nothing_are_not_used_again() -> None:
    rig = Rig(1)
    step = rig.start("r", PROMPT, SHAPED)
    pool = SequencePool(lambda _: rig.layer_group(0).new_cache(), None, max_bytes=0)
    pool.get(0, "r", now_s=0.0)
    shaping = Shaping(pool, rig.ledger, 0, processors_of)
    taken = shaping.take(step)
    assert taken is not None
    taken[0].advance(5)

    again = shaping.take(step)
    assert again is not None
    assert again is not taken
    shaping.keep(step, again, [5, 6])

    assert shaping.take(replace(step, position=step.position + 2)) is again
    assert shaping.take(replace(step, position=step.position + 2)) is not again


@pytest.mark.parametrize("change", [{"position": 3}, {"position": 1}, {"position": 2, "epoch": 1}])
def test_processors_that_stand_elsewhere_are_made_anew(change: dict[str, int]) -> None:
    rig = Rig(1)
    step = rig.start("r", PROMPT, SHAPED)
    rig.ledger.commit("r", 0, step.end_position, [5, 6, 7])
    pool = SequencePool(lambda _: rig.layer_group(0).new_cache(), None, max_bytes=0)
    pool.get(0, "r", now_s=0.0)
    shaping = Shaping(pool, rig.ledger, 0, processors_of)
    kept = shaping.take(step)
    assert kept is not None
    shaping.keep(step, kept, [5, 6])

    other = replace(step, **{**change, "position": step.position + change["position"]})  # type: ignore[arg-type]

    assert shaping.take(other) is not kept
