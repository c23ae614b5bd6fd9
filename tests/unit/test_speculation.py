"""Speculation changes how many steps it takes, and not one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.worker.limits import WorkerLimits
from services.worker.sequences import SequenceState
from services.worker.steps import with_draft
from shared import codec
from shared.broker.base import Outgoing
from shared.errors import KernelError
from shared.messages import Request, SamplingParams, Step
from shared.model.kv_cache import SequenceCache
from shared.store.kv_pages import KvPages
from tests.faults import CALLS, Crash, LosableBroker, LossyBroker, Tripwire
from tests.rig import Rig, assert_answers
from tests.rig_model import GREEDY, SAMPLED, expected_tokens, prompt_of, rig_model

# Both repeat themselves now and then, and go on otherwise than guessed now and then.
PROMPT = prompt_of(7) * 4
LOOPING = replace(GREEDY, max_tokens=40, speculation=True)
WANDERING = replace(SAMPLED, max_tokens=40, temperature=0.2, speculation=True)
ASKED = [("greedy", PROMPT, LOOPING), ("sampled", prompt_of(5, salt=3) * 5, WANDERING)]
SLICED = WorkerLimits(max_batch_rows=12)
TRAVELLING = WorkerLimits(keeps_steps=False)

Asked = Sequence[tuple[str, Sequence[int], SamplingParams]]


def is_step(message: Outgoing) -> bool:
    return isinstance(codec.decode(message.body), Step)


class Watched:
    """A last group whose decode steps are seen; those numbered in `lost` get lost."""

    def __init__(self, rig: Rig, **parts: Any) -> None:
        self.lost: set[int] = set()
        self.line = LossyBroker(rig.new_broker(), self.lost, only_if=is_step)
        self.worker = rig.add_worker(rig.layout.last_group, broker=self.line, **parts)

    @property
    def steps(self) -> list[Step]:
        decoded = [codec.decode(message.body) for message in self.line.seen]
        return [step for step in decoded if isinstance(step, Step)]

    @property
    def num_drafted(self) -> int:
        return sum(len(step.draft) for step in self.steps)

    @property
    def num_accepted(self) -> int:
        return sum(len(step.accepted) for step in self.steps)


class GaplessPages:
    """Pages to which nobody writes rows whose predecessors are missing."""

    def __init__(self, inner: KvPages) -> None:
        self._inner = inner

    def start_writes(self, writes: Any) -> Any:
        wait = self._inner.start_writes(writes)

        def wait_without_problems() -> Any:
            problems = wait()
            assert not any(problems)
            return problems

        return wait_without_problems

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def submit(rig: Rig, asked: Asked) -> None:
    for request_id, prompt, sampling in asked:
        rig.submit(Request(request_id, token_ids=tuple(prompt), sampling=sampling))


def finish(rig: Rig, asked: Asked) -> None:
    rig.run_until_quiet()
    assert_answers(rig, asked)
    assert rig.num_dead() == 0


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("embedded", [False, True], ids=["store", "embedded"])
@pytest.mark.parametrize("number", [0, 1])
def test_one_request_has_its_tokens_in_fewer_steps(
    number: int, embedded: bool, num_groups: int
) -> None:
    rig = Rig(num_groups, embedded=embedded, limits=TRAVELLING)
    for group in range(num_groups - 1):
        rig.add_worker(group)
    last = Watched(rig)
    rig.add_scheduler()

    submit(rig, [ASKED[number]])
    finish(rig, [ASKED[number]])

    assert last.num_accepted > 0
    assert last.num_drafted > last.num_accepted
    assert len(last.steps) + 1 <= 40 - last.num_accepted


@pytest.mark.parametrize("embedded", [False, True], ids=["store", "embedded"])
@pytest.mark.parametrize("number", [0, 1])
def test_steps_that_stay_are_drafted_too(number: int, embedded: bool) -> None:
    rig = Rig(1, embedded=embedded)
    last = Watched(rig)
    rig.add_scheduler()

    submit(rig, [ASKED[number]])
    finish(rig, [ASKED[number]])

    assert last.worker.num_steps_done < 40
    assert len(last.steps) < 6


def test_without_speculation_nothing_is_drafted() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    last = Watched(rig)
    rig.add_scheduler()
    plain = replace(LOOPING, speculation=False)

    submit(rig, [("r", PROMPT, plain)])
    finish(rig, [("r", PROMPT, plain)])

    assert len(last.steps) == 39
    assert (last.num_drafted, last.num_accepted) == (0, 0)


def test_sequences_of_one_batch_are_verified_together() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    last = Watched(rig)
    rig.add_scheduler()

    submit(rig, ASKED)
    finish(rig, ASKED)

    assert last.num_accepted > 0
    assert last.worker.num_steps_done < 80


def test_a_batch_that_is_big_drafts_nothing() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    last = Watched(rig)
    asked = [(f"r{i}", prompt_of(7, salt=i) * 4, LOOPING) for i in range(8)]
    for request_id, prompt, sampling in asked:
        rig.start(request_id, prompt, sampling)

    finish(rig, asked)

    assert last.num_drafted == 0


def draft_by_hand(rig: Rig, draft: Sequence[int], sampling: SamplingParams, **changes: Any) -> None:
    """Start a request in two groups, and add a draft to its first decode step."""
    rig.add_worker(0)
    line = LossyBroker(rig.new_broker(), lost={1}, only_if=is_step)
    rig.add_worker(1, broker=line)
    rig.start("r", PROMPT, replace(sampling, speculation=False), **changes)
    rig.run_until(lambda: bool(line.seen))
    step = codec.decode(line.seen[0].body)
    assert isinstance(step, Step)
    rig.publish_step(with_draft(step, draft))
    rig.turn()


@pytest.mark.parametrize("sampling", [LOOPING, WANDERING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("num_right", range(5))
def test_a_draft_is_taken_up_to_its_first_wrong_token(
    num_right: int, sampling: SamplingParams
) -> None:
    tokens = expected_tokens(PROMPT, sampling)
    draft = [*tokens[1 : 1 + num_right], tokens[1 + num_right] ^ 1, *tokens[2 + num_right : 5]]
    rig = Rig(2)

    draft_by_hand(rig, draft, sampling)

    assert rig.tokens("r") == tokens[: 2 + num_right]
    finish(rig, [("r", PROMPT, sampling)])


@pytest.mark.parametrize("sampling", [LOOPING, WANDERING], ids=["greedy", "sampled"])
@pytest.mark.parametrize("max_tokens", range(2, 7))
def test_an_answer_of_limited_length_ends_within_a_draft(
    max_tokens: int, sampling: SamplingParams
) -> None:
    tokens = expected_tokens(PROMPT, sampling)
    rig = Rig(2)

    draft_by_hand(rig, tokens[1:6], replace(sampling, max_tokens=max_tokens))
    rig.run_until_quiet()

    assert rig.tokens("r") == tokens[:max_tokens]
    assert [event.finish_reason for event in rig.final_events("r")] == ["length"]


@pytest.mark.parametrize("stop_at", range(1, 7))
def test_a_stop_token_ends_the_answer_within_a_draft(stop_at: int) -> None:
    tokens = expected_tokens(PROMPT, WANDERING)
    end = tokens.index(tokens[stop_at])
    rig = Rig(2)

    sampling = replace(WANDERING, ignore_eos=False)
    draft_by_hand(rig, tokens[1:6], sampling, stop_token_ids=(tokens[stop_at],))
    rig.run_until_quiet()

    assert rig.tokens("r") == tokens[: end + 1]
    assert [event.finish_reason for event in rig.final_events("r")] == ["stop"]


def test_no_row_is_computed_that_no_token_could_need() -> None:
    rig = Rig(2)
    rig.add_worker(0)
    last = Watched(rig)

    rig.start("r", PROMPT, LOOPING)
    finish(rig, [("r", PROMPT, LOOPING)])

    most = max(step.position + step.num_positions for step in last.steps)
    assert most <= len(PROMPT) + LOOPING.max_tokens - 1


@pytest.mark.parametrize("nth", [2, 5, 9])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("group", "part", "method"), CALLS)
def test_a_worker_that_dies_with_a_draft_in_hand_changes_no_token(
    group: int, part: str, method: str, after: bool, nth: int
) -> None:
    rig = Rig(2, limits=SLICED)
    inner = {"kv_pages": rig.kv_pages, "ledger": rig.ledger, "broker": LosableBroker(rig.hub)}
    wire = Tripwire(inner[part], method, Crash, after=after, nth=nth)
    rig.add_worker(group, **{part: wire})
    rig.add_workers()
    rig.add_scheduler()

    submit(rig, ASKED)
    finish(rig, ASKED)

    assert rig.num_crashes == 1


@pytest.mark.parametrize("kv_cache_bytes", [0, 32 << 20], ids=["forgetful", "remembering"])
@pytest.mark.parametrize("nth", range(2, 12, 3))
def test_a_lost_step_is_driven_again_from_known_rows(nth: int, kv_cache_bytes: int) -> None:
    rig = Rig(2, limits=WorkerLimits(kv_cache_bytes=kv_cache_bytes))
    rig.add_worker(0)
    rig.add_worker(1, broker=LossyBroker(rig.new_broker(), lost={nth}))
    scheduler = rig.add_scheduler()

    submit(rig, [ASKED[0]])
    finish(rig, [ASKED[0]])

    assert scheduler.num_redrives >= 1


def test_rows_of_guesses_never_reach_the_store() -> None:
    # given a request with steps whose drafts are partly wrong
    rig = Rig(2)
    for group in (0, 1):
        rig.add_worker(group, kv_pages=GaplessPages(rig.kv_pages))
    rig.start("r", *ASKED[1][1:])
    while not rig.record("r").finish_reason:
        committed = rig.record("r").committed_position
        rig.turn()
        assert max(rig.num_kv_rows("r")) <= max(committed + 1, len(ASKED[1][1]))
    tokens = rig.tokens("r")
    stored = [rig.kv_pages.read("r", g, 0, rig.kv_pages.num_rows("r", g)) for g in (0, 1)]

    # then what is stored is what the tokens alone give
    again = Rig(2)
    again.add_workers()
    plain = replace(ASKED[1][2], speculation=False)
    again.start("r", ASKED[1][1], plain)
    again.run_until_done("r")
    assert again.tokens("r") == tokens
    for group, rows in enumerate(stored):
        assert again.kv_pages.read("r", group, 0, again.kv_pages.num_rows("r", group)) == rows


@pytest.mark.parametrize("nth", range(1, 8))
def test_a_late_copy_of_a_drafted_step_does_no_harm(nth: int) -> None:
    # given a copy of a step with a draft, which another worker of the group computes later
    rig = Rig(2)
    first = rig.add_worker(0)
    last = Watched(rig)
    rig.add_scheduler()
    submit(rig, [ASKED[1]])
    rig.run_until(lambda: sum(bool(step.draft) for step in last.steps) == nth)
    copy = last.steps[-1]
    rig.run_until(lambda: len(rig.tokens("sampled")) >= copy.position - len(ASKED[1][1]) + 4)

    rig.kill(first)  # nobody remembers the step
    rig.add_worker(0)
    rig.publish_step(replace(copy, route=()))
    finish(rig, [ASKED[1]])


@pytest.mark.parametrize("cut", [0, 1])
def test_a_repeat_with_a_shorter_draft_goes_on_after_the_winner(cut: int) -> None:
    # given a drafted step whose tokens are committed, and whose output got lost
    rig = Rig(1, limits=TRAVELLING)
    last = Watched(rig)
    rig.start("r", PROMPT, LOOPING)
    rig.run_until(lambda: bool(last.steps) and len(last.steps[-1].draft) > 1)
    step = last.steps[-1]
    before = len(rig.tokens("r"))
    last.lost.add(len(last.steps) + 1)
    rig.run_until(lambda: len(rig.tokens("r")) > before + 1)
    rig.kill(last.worker)

    # when another worker computes it with less of a draft
    other = Watched(rig)
    tensors = {"token_ids": step.tensors["token_ids"][: 1 + cut]}
    rig.publish_step(replace(step, draft=step.draft[:cut], tensors=tensors, route=()))
    rig.turn()

    # then it sends on what was committed: the rows that it lacks are computed
    (sent,) = other.steps[:1]
    assert sent.end_position == len(PROMPT) + len(rig.tokens("r"))
    assert (len(sent.accepted), sent.draft) == (cut, ())
    finish(rig, [("r", PROMPT, LOOPING)])


def test_a_guess_that_cannot_be_computed_is_only_a_bad_guess() -> None:
    rig = Rig(2)

    class Picky:
        """A layer group that refuses rows of drafts now and then."""

        num_refused = 0

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def forward(self, rows: Any, sequences: Any) -> Any:
            if 1 < len(rows) <= 6:
                self.num_refused += 1
                raise KernelError("not finite")
            return self._inner.forward(rows, sequences)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

    picky = Picky(rig.layer_group(0))
    rig.add_worker(layer_groups={0: picky})
    rig.add_worker(1)

    rig.start("r", PROMPT, LOOPING)
    finish(rig, [("r", PROMPT, LOOPING)])

    assert picky.num_refused > 0


def test_a_worker_that_leaves_takes_no_accepted_rows_with_it() -> None:
    # given a request of which a worker that is about to leave has rows
    rig = Rig(2)
    first = rig.add_worker(0)
    last = Watched(rig)
    rig.start("r", PROMPT, LOOPING)
    rig.run_until(lambda: bool(last.steps) and bool(last.steps[-1].draft))
    num_steps = len(last.steps)

    # when it is said to leave
    rig.peers["w1"] = replace(rig.peers["w1"], state="draining")
    rig.clock.sleep(2.0)
    rig.run_until(lambda: len(last.steps) > num_steps)
    rig.run_until(lambda: len(last.steps) > num_steps + 1)

    # then steps count on no rows of it
    assert all(not step.accepted for step in last.steps[num_steps + 1 :])
    first.hand_back_all()
    rig.kill(first)
    rig.add_worker(0)
    finish(rig, [("r", PROMPT, LOOPING)])


@pytest.mark.parametrize(
    ("accepted", "position", "kept"),
    [
        ((7, 8), 12, 12),  # all that were guessed came
        ((7, 9), 12, 11),
        ((9,), 11, 10),
        ((5, 7), 11, 11),  # 5 was known before
        ((), 10, 10),
        ((), 12, 10),  # nobody says which tokens came
        ((8,), 12, 10),
    ],
)
def test_rows_of_guesses_are_kept_if_their_tokens_came(
    accepted: tuple[int, ...], position: int, kept: int
) -> None:
    config = rig_model().config
    cache = SequenceCache(1, config.num_key_value_heads, config.head_dim)
    cache.ensure_capacity(12)
    cache.advance(12)
    state = SequenceState(cache, draft=(7, 8))

    state.keep_known(position, accepted)

    assert (cache.num_positions, state.draft) == (kept, ())
